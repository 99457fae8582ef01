"""Settings, commands, error types and metrics that people can meet are in the pages."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram

from adapter_bucket.cli import make_parser
from adapter_bucket.s3_settings import _NOT_IN_URL, S3Settings
from bucket_lora_proxy.config_flags import build_parser
from bucket_lora_proxy.errors import ErrorType
from tests.unit.docs.conftest import ROOT
from trl_async_bucket.callback_config import BucketSyncArguments
from trl_async_bucket.config import BucketSyncFields
from trl_async_bucket.launch.run_config import ReplicasConfig, RunConfig, TrainerConfig
from vllm_bucket_lora import metrics as plugin_metrics
from vllm_bucket_lora.config import OPTIONS

WORDS: dict[str, Any] = {"off": False, "false": False, "none": None}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def defaults(page: str) -> dict[str, str]:
    """Second column of the page's tables by each name in the first: its code, or else its text."""
    found: dict[str, str] = {}
    for line in text_of(page).splitlines():
        if line.startswith("| `"):
            names, text, *_ = re.split(r"(?<!\\)\|", line)[1:]
            code = re.match(r" `([^`]+)`", text)
            for name in re.findall(r"`([^`]+)`", names):
                found.setdefault(name, code[1] if code else text.strip())
    return found


def value_of(text: str) -> Any:
    """A default as a page writes it; a text that says more than a value stays a text."""
    if text in WORDS:
        return WORDS[text]
    if size := re.fullmatch(r"(\d+) MiB", text):
        return int(size[1]) * 1024**2
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def fields_of(owner: Any, name: Callable[[str], str] = lambda name: name) -> dict[str, Any]:
    return {name(field.name): field.default for field in dataclasses.fields(owner)}


def of_the_proxy() -> dict[str, Any]:
    limits = [
        action
        for action in build_parser()._actions
        if isinstance(action.default, int | float) and "--check" not in action.option_strings
    ]
    return {action.option_strings[0]: action.default for action in limits}


SETTINGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "proxy": (["docs/proxy.md"], of_the_proxy() | {"--host": "127.0.0.1"}),
    "plugin": (["docs/plugin.md"], {option.flag: option.default for option in OPTIONS}),
    "trainer": (["docs/trainer.md", "docs/preemption.md"], fields_of(BucketSyncFields)),
    "bucket": (
        ["docs/bucket.md"],
        {name: value for name, value in fields_of(S3Settings).items() if name not in _NOT_IN_URL},
    ),
    "jobs": (
        ["deploy/hf-jobs/README.md"],
        fields_of(RunConfig)
        | fields_of(ReplicasConfig, "replicas.{}".format)
        | fields_of(TrainerConfig, "trainer.{}".format),
    ),
}

# What the code fills in later, or a page says in more words than the value.
IN_WORDS = {
    "--bucket-lora-runs", "--allow-broadcast", "replicas.image", "trainer.image",
    "replicas.install", "trainer.install", "bucket_max_lag", "min_replicas", "replicas", "trainer",
}  # fmt: skip


@pytest.mark.parametrize("part", SETTINGS)
def test_settings_are_in_the_pages_with_their_defaults(part: str) -> None:
    pages, settings = SETTINGS[part]
    shown: dict[str, str] = {}
    for page in pages:
        shown = defaults(page) | shown
    missing = settings.keys() - shown.keys() - IN_WORDS
    assert not missing, f"not in a table of {pages}: {sorted(missing)}"
    for name in settings.keys() - IN_WORDS:
        default = settings[name]
        if default is not None and default is not dataclasses.MISSING and default != ():
            assert value_of(shown[name]) == default, f"{name} is {default!r} in the code"


def test_every_flag_of_the_proxy_is_on_its_page() -> None:
    page = text_of("docs/proxy.md")
    flags = [action.option_strings[-1] for action in build_parser()._actions]
    assert not [flag for flag in flags if flag != "--help" and not re.search(rf"{flag}\b", page)]


def test_arguments_of_the_callback_are_on_the_trainers_page() -> None:
    page = text_of("docs/trainer.md")
    shown = defaults("docs/trainer.md")
    for name, default in fields_of(BucketSyncArguments).items():
        argument = name.removeprefix("bucket_")
        assert f"`{argument}`" in page or f"{argument}=" in page or f"`{name}`" in page, name
        if argument in shown and default is not None:
            assert value_of(shown[argument]) == default, name


def test_every_command_for_the_bucket_is_on_its_page() -> None:
    page = text_of("docs/bucket.md")
    (commands,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, command in commands.choices.items():
        (row,) = re.findall(rf"^\| `{name} .*$", page, re.M)
        for action in command._actions:
            flag = (action.option_strings or [""])[-1]
            if flag in ("", "--help", "--json"):
                continue
            assert f"`{flag}" in row, f"{name} {flag}"
            if isinstance(action.default, int | float) and action.default is not False:
                assert f"`{flag}` ({action.default:g}" in row, f"{name} {flag}"


def test_every_type_of_error_of_the_proxy_is_on_its_page() -> None:
    page = text_of("docs/proxy.md")
    assert not [kind for kind in ErrorType if f"`{kind}`" not in page]


def names_in(pattern: str, *paths: Path) -> set[str]:
    return {name for path in paths for name in re.findall(pattern, path.read_text("utf-8"))}


def test_every_metric_is_in_the_pages() -> None:
    trainer = names_in(r'"(bucket/[a-z_]+)"', *(ROOT / "trl_async_bucket").rglob("*.py"))
    assert len(trainer) > 10
    pages = text_of("docs/trainer.md") + text_of("docs/preemption.md")
    assert not [name for name in trainer if f"`{name}`" not in pages]

    plugin = {
        metric._name
        for metric in vars(plugin_metrics).values()
        if isinstance(metric, Counter | Gauge | Histogram)
    }
    assert len(plugin) > 8
    assert not [name for name in plugin if name not in text_of("docs/plugin.md")]

    source = ROOT / "proxy" / "metrics.py"
    proxy = names_in(r'(?:"bucket_lora_proxy_|_PREFIX\}|count\(\s*")([a-z_]+)"', source)
    assert len(proxy) > 15
    page = text_of("docs/proxy.md")
    assert not [name for name in proxy if f"`{name}`" not in page]


def test_every_variable_is_in_the_pages() -> None:
    own = {"BUCKET_LORA_SESSION_DIR", "BUCKET_LORA_SCRIPT"}  # one process of ours tells another
    code = [
        path
        for package in ("adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "proxy")
        for path in (ROOT / package).rglob("*.py")
    ]
    variables = names_in(r"\bBUCKET_LORA_[A-Z_]+[A-Z]\b", *code) - own
    assert len(variables) > 6
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert not [name for name in variables if f"`{name}" not in pages]

"""What the pages tell people to type is understood by what they type it to."""

from __future__ import annotations

import ast
import json
import logging
import logging.config
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.cli import make_parser
from adapter_bucket.json_logs import JsonFormatter
from bucket_lora_proxy.config_flags import build_parser as proxy_parser
from tests.unit.docs.conftest import ROOT
from vllm_bucket_lora.config import OPTIONS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of a page that are marked with one of these languages; "" for no mark."""
    fenced = re.findall(r"^```(.*)\n((?:(?!```).*\n)*)```", page.read_text("utf-8"), re.M)
    return [text for language, text in fenced if language in languages]


def commands(name: str) -> Iterator[tuple[str, list[str]]]:
    """Arguments of every call of a command in the pages; ``…`` stands for more of them."""
    for page in PAGES:
        for block in blocks(page, "bash", ""):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words[:1] == [name] and "…" not in words:
                    yield page.name, words[1:]


def parsed(parser: Any, arguments: list[str], where: str) -> Any:
    try:
        return parser.parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{where}: {arguments} is not understood")


def test_commands_in_the_pages_are_understood() -> None:
    found = list(commands("bucket-lora"))
    assert len(found) > 8
    for page, arguments in found:
        parsed(make_parser(), arguments, page)
    found = list(commands("bucket-lora-proxy"))
    assert len(found) > 3
    for page, arguments in found:
        parsed(proxy_parser(), arguments, page)


def test_flags_of_the_plugin_in_the_pages_exist() -> None:
    known = {option.flag for option in OPTIONS}
    for page in PAGES:
        named = set(re.findall(r"--bucket-lora-[a-z-]+[a-z]", page.read_text(encoding="utf-8")))
        assert named <= known, page.name


def test_python_in_the_pages_is_python() -> None:
    whole = [
        (page.name, block)
        for page in PAGES
        for block in blocks(page, "python")
        if "…" not in block  # an excerpt
    ]
    assert len(whole) > 5
    for page, block in whole:
        compile(block, page, "exec")


def test_the_reward_of_the_first_hour_rewards_vowels() -> None:
    (script,) = blocks(ROOT / "docs" / "first-hour.md", "python")
    tree = ast.parse(script)
    # The rest needs a model and a server; this is what a reader changes first.
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) or getattr(node, "name", "") == "vowels"
    ]
    scope: dict[str, Any] = {}
    exec(compile(tree, "first-hour.md", "exec"), scope)
    chats = [[{"role": "assistant", "content": text}] for text in ("aeiouaeiouae", "bcdf", "")]
    assert scope["vowels"](chats, prompts=[]) == [1.0, 0.0, 0.0]


def test_the_log_line_that_is_shown_is_one_of_ours() -> None:
    (block,) = blocks(ROOT / "docs" / "observability.md", "json")
    shown = json.loads(block)
    extra = {"run": shown["run"], "version": shown["version"], "replica": shown["replica"]}
    record = logging.makeLogRecord({"name": shown["logger"], "msg": "…", **extra})
    written = json.loads(JsonFormatter(part=shown["part"], replica=shown["replica"]).format(record))
    assert list(written) == list(shown)
    assert written["trace_id"].startswith(shown["trace_id"].rstrip("…"))


def test_the_logging_config_for_vllm_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"<<'JSON'\n(.*?)^JSON$", page, re.M | re.S)
    logger = logging.getLogger("vllm")
    before = logger.handlers, logger.level, logger.propagate
    try:
        logging.config.dictConfig(json.loads(config))
        logger.info("hello")
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    assert json.loads(capsys.readouterr().err)["part"] == "vllm"

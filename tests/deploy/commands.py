"""Finds the command lines in launchers of every kind, and says what our commands think of them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bucket_lora_proxy.config_flags import build_parser
from trl_async_bucket.__main__ import parser as trainer_parser
from trl_async_bucket.launch.__main__ import parser as launch_parser
from vllm_bucket_lora.config import OPTIONS, PLUGIN_NAME

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

PROGRAMS = (
    ("vllm", "serve"),
    ("bucket-lora-proxy",),
    ("-m", "trl_async_bucket"),
    ("-m", "trl_async_bucket.launch"),
)
_EXPANDED = re.compile(r"\$\{?\w+\}?|\$\(\w[^()]*\)|%i")


def launchers() -> list[Path]:
    """Every file that starts something, READMEs included: people copy from them."""
    kinds = (".yaml", ".sbatch", ".service", ".md", ".sh")
    return sorted(path for path in DEPLOY.rglob("*") if path.suffix in kinds)


def commands(path: Path) -> list[list[str]]:
    """Argument lists of all our commands in a launcher, from the program's name on."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml" and "skypilot" not in path.parts:
        found = [argv for document in yaml.safe_load_all(text) for argv in _in_yaml(document)]
    elif path.suffix == ".md":
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        found = [argv for block in blocks for argv in _in_shell(block)]
    else:
        found = list(_in_shell(text))
    return [own for argv in found for own in _ours(argv)]


def _in_yaml(node: Any) -> Iterator[list[str]]:
    """Kubernetes: ``command`` and ``args``; Compose: ``command`` after the image's entry point."""
    if isinstance(node, list):
        for item in node:
            yield from _in_yaml(item)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("command"), list):
        entry = _entry_point(node["build"]["dockerfile"]) if "build" in node else []
        yield [str(part) for part in (*entry, *node["command"], *node.get("args", []))]
    for value in node.values():
        yield from _in_yaml(value)


def _entry_point(dockerfile: str) -> list[str]:
    text = (ROOT / dockerfile).read_text()
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    return [str(part) for part in json.loads(found)]


def _in_shell(text: str) -> Iterator[list[str]]:
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not any(" ".join(program) in line for program in PROGRAMS):
            continue
        # What the shell would put in is one word here.
        one_word = re.sub(r"\$\([^()]*\)", "EXPANDED", line)
        yield shlex.split(one_word.partition("ExecStart")[2].partition("=")[2] or one_word, True)


def _ours(argv: list[str]) -> Iterator[list[str]]:
    for program in PROGRAMS:
        for place, word in enumerate(argv):
            rest = argv[place:]
            if (Path(word).name, *rest[1 : len(program)]) == program:
                yield [*program, *rest[len(program) :]]


def fault(argv: list[str]) -> str | None:
    """What is wrong with one of our command lines."""
    argv = [_EXPANDED.sub("8000", part) for part in argv]
    if argv[0] == "vllm":
        return _vllm_fault(argv[2:])
    if argv[0] == "bucket-lora-proxy":
        return _parse(build_parser(), argv[1:])
    if argv[1] == "trl_async_bucket":
        return _parse(trainer_parser(), argv[2:])
    own, _, _ = [*argv[2:], "--"], None, None
    own = own[: own.index("--")]
    if own[:1] != ["with-proxy"]:
        return _parse(launch_parser(), own)
    _, rest = launch_parser().parse_known_args(own)
    return _parse(build_parser(), rest)


def _parse(parser: Any, argv: list[str]) -> str | None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parser.parse_args(argv)
        except SystemExit as stop:
            return None if stop.code == 0 else said.getvalue().strip().splitlines()[-1]
    return None


def _vllm_fault(argv: list[str]) -> str | None:
    for flag in (part.partition("=")[0] for part in argv if part.startswith("--")):
        if flag not in vllm_flags():
            return f"vllm serve has no {flag}"
    plugin_at = argv.index("--plugin") + 1 if "--plugin" in argv else 0
    if f"--plugin={PLUGIN_NAME}" not in argv and argv[plugin_at : plugin_at + 1] != [PLUGIN_NAME]:
        return f"--plugin {PLUGIN_NAME} is missing"
    return None


@cache
def vllm_flags() -> frozenset[str]:
    """Flags of ``vllm serve``, ours included. Read from its source: importing it takes 13 s."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    vllm = Path(spec.origin).parent
    flags = {"--plugin", *(option.flag for option in OPTIONS)}
    flags |= set(re.findall(r'"(--[a-z0-9-]+)"', (vllm / "engine" / "arg_utils.py").read_text()))
    frontend = (vllm / "entrypoints" / "launchers" / "cli_args.py").read_text()
    for node in ast.walk(ast.parse(frontend)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            flags.add("--" + node.target.id.replace("_", "-"))
    return frozenset(flags)

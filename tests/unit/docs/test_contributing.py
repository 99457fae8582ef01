"""What CONTRIBUTING.md says of the code holds, and each decision can be found from its subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit.docs.conftest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def importers(folder: Path, package: str) -> set[str]:
    """Files below the folder that import the package or a part of it."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if any(name.partition(".")[0] == package for name in names):
                found.add(path.relative_to(folder).as_posix())
    return found


def test_upstream_is_imported_where_the_rules_say() -> None:
    (said,) = re.findall(r"vLLM in the plugin's (.*?) only", PAGE, re.S)
    assert importers(ROOT / "vllm_bucket_lora", "vllm") == set(re.findall(r"`([^`]+)`", said))
    trl = importers(ROOT / "trl_async_bucket", "trl")
    assert trl
    assert {name.partition("/")[0] for name in trl} == {"compat"}


def test_every_decision_is_linked_from_what_it_is_about() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    decisions = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert len(set(numbers)) == len(numbers)
    assert not [path.name for path in decisions if f"decisions/{path.name})" not in text]

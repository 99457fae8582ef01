"""Names of settings and metrics in the pages are names in the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from tests.unit.docs.conftest import ROOT
from trl_async_bucket.compat.seam import TESTED_TRL
from trl_async_bucket.config import BucketSyncFields

CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for package in ("adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "proxy")
    for path in (ROOT / package).rglob("*.py")
)
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
}


def named(pattern: str) -> set[tuple[str, str]]:
    """Matches of the pattern in the pages, each with a page that has it."""
    return {(name, page) for page, text in PAGES.items() for name in re.findall(pattern, text)}


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bBUCKET_LORA_[A-Z_]+[A-Z]\b",  # environment
        r"`(bucket/[a-z_]+)`",  # the trainer's metrics
        r"`(?:bucket_lora_proxy_)(?!run_)([a-z_]{4,})`",  # the proxy's, which adds the prefix
        r"`(bucket_lora_(?!proxy)[a-z_]+?)(?:_total)?`",  # the plugin's
    ],
)
def test_names_in_the_pages_are_in_the_code(pattern: str) -> None:
    found = named(pattern)
    assert found
    unknown = [(name, page) for name, page in found if name not in CODE]
    assert not unknown, f"no code knows these names: {sorted(unknown)}"


def test_files_and_programs_in_the_pages_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md"),
             ROOT / "examples" / "README.md"]  # fmt: skip
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    folders = "tests|benchmarks|scripts|deploy|docs|examples|demo|proxy"
    packages = "adapter_bucket|trl_async_bucket|vllm_bucket_lora"
    files = set(re.findall(rf"`((?:{folders}|{packages})/[\w./@-]+)`", text))
    assert len(files) > 30
    assert not [name for name in files if not (ROOT / name).exists()]
    programs = set(re.findall(rf"python -m ((?:{folders}|{packages})[\w.]*\w)", text))
    assert len(programs) > 15
    paths = [ROOT / name.replace(".", "/") for name in programs]
    assert not [p for p in paths if not (p.with_suffix(".py").exists() or p.is_dir())]


def test_metrics_of_trl_in_the_pages_are_trls() -> None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "experimental" / "async_grpo"
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    found = named(r"`((?:perf|sample|rollout)/[a-z_]+)`")
    assert len(found) > 4
    assert not [(name, page) for name, page in found if f'"{name}"' not in source]


def test_tested_releases_are_the_same_everywhere() -> None:
    for page, mark in (("README.md", "Tested versions: TRL "), ("compatibility.md", "| TRL | "),
                       ("upstream.md", "tested range: ")):  # fmt: skip
        text = PAGES[page].partition(mark)[2][:40]
        assert tuple(re.findall(r"\d+\.\d+\.\d+", text))[:3] == TESTED_TRL, page
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TRL_RELEASES={','.join(TESTED_TRL)} " in makefile
    tried = re.findall(r"^\| (0\.\d+\.\d+) \| passed", PAGES["plugin.md"], re.M)
    (row,) = re.findall(r"^\| vLLM \| ([^|]*) \|", PAGES["compatibility.md"], re.M)
    assert len(tried) > 2
    assert row.split(", ") == sorted(tried)
    assert f"vLLM {min(tried)} to {max(tried)}" in PAGES["README.md"]


def test_fields_of_the_trainers_in_the_pages_exist() -> None:
    known = {field.name for field in dataclasses.fields(BucketSyncFields)}
    # Others that begin alike: the proxy's, and the plugin's package and metrics.
    found = {(name, page) for name, page in named(r"`(bucket_[a-z_]+)`")
             if not name.startswith("bucket_lora")}  # fmt: skip
    unknown = [(name, page) for name, page in found if name not in known]
    assert not unknown, f"not a field: {sorted(unknown)}"
    undocumented = known - {name for name, _ in named(r"\b(bucket_[a-z_]+|weight_sync)\b")}
    assert not undocumented

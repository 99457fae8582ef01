"""Every benchmark still runs, as far as seconds go: nothing here rots unseen.

What needs no vLLM runs small; what does, or takes a GPU, must read its arguments; parts and
commands without arguments are imported. A new file in ``benchmarks/`` without an entry fails.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.conftest import ROOT

TINY_PROCESSES = (
    "publish_to_ready", "growth_watchers", "growth_prefixes", "optimizer_blocked", "round_trips",
)  # fmt: skip
"""With ``--tiny``; they start processes or set variables."""

TINY_HERE = ("fetch_beside_a_loop", "growth_manifest", "growth_tensors")
"""With ``--tiny``, in this process: torch is imported once."""

SMALL = {
    "checkpoint_costs": ("--mib", "1"),
    "gpu.snapshot": ("--tiny", "--processes", "2", "--out", ".benchmarks/gpu"),
    "proxy_decision": ("--groups", "2"),
    "proxy_own_code": ("--requests", "100"),
    "proxy_memory": ("--routed", "1000", "--served", "0"),
    "proxy_throughput": (
        "--seconds", "0.1", "--rounds", "1", "--connections", "1", "--beside", "floor", "recipe",
    ),
}  # fmt: skip
"""With other arguments, and a table or a figure on stdout."""

ARGUMENTS = (
    "end_to_end", "gpu.hot_swap", "gpu.load", "gpu.trainer", "gpu.whole_run",
    "plugin_soak", "plugin_swap_dip", "proxy_affinity", "replica_memory", "side_by_side",
    "slow_bucket", "soak",
)  # fmt: skip
"""``--help``: they take vLLM, a GPU, or minutes."""

IMPORTED = (
    "adapters", "bucket_costs", "buckets", "flatness", "gpu.attention", "gpu.contenders",
    "gpu.engine_log", "gpu.metadata", "gpu.probe", "gpu.replica", "gpu.report", "gpu.shapes",
    "gpu.swap_profile", "gpu.swap_summary", "gpu.swap_window", "gpu.task",
    "heap_report.sitecustomize", "plugin_cpu", "plugin_loop_blocked", "plugin_probe_tolerance",
    "plugin_swap_report", "process_memory", "proxy_floor", "proxy_load", "proxy_recipe",
    "proxy_rivals", "ranks", "recorded_store", "replicas", "report.__main__", "report.data",
    "report.growth", "report.page", "report.plots", "report.runs", "report.syncs", "results",
    "slow_link", "soak_fleet", "test_gather", "test_probe", "test_snapshot", "trainings",
)  # fmt: skip
"""Parts of others, and commands that take no arguments."""

LEFT_OUT = {"bucket_compression": "needs zstandard, which nothing else does"}


def test_every_benchmark_has_an_entry_here() -> None:
    folder = ROOT / "benchmarks"
    there = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }
    entries = [*TINY_PROCESSES, *TINY_HERE, *SMALL, *ARGUMENTS, *IMPORTED, *LEFT_OUT]
    assert sorted(entries) == sorted(there)


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main_of(module: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    importlib.import_module(f"benchmarks.{module}").main()


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    written = json.loads((folder / f"{name}.json").read_text())
    named = {"processor", "cores", "load before", "versions", "commit"}
    assert written["environment"].keys() >= named
    found: list[dict[str, object]] = written["rows"]
    return found


@pytest.mark.parametrize("module", TINY_PROCESSES)
def test_its_tiny_mode_runs_and_writes_rows(module: str, tmp_path: Path) -> None:
    printed = run(module, "--tiny", "--out", str(tmp_path))
    assert "|---|" in printed
    assert rows(tmp_path, module)


@pytest.mark.parametrize("module", TINY_HERE)
def test_its_tiny_mode_runs_here(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_of(module, monkeypatch, "--tiny", "--out", str(tmp_path))
    assert rows(tmp_path, module)


@pytest.mark.parametrize("module", SMALL)
def test_it_runs_small(module: str) -> None:
    assert run(module, *SMALL[module]).strip()


@pytest.mark.parametrize("module", ARGUMENTS)
def test_it_reads_its_arguments(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main_of(module, monkeypatch, "--help")
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("module", IMPORTED)
def test_it_is_imported(module: str) -> None:
    importlib.import_module(f"benchmarks.{module}")

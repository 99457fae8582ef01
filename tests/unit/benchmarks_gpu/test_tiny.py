"""The GPU benchmarks still run, as far as a CPU and seconds go; `--tiny` goes further by hand."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import hot_swap, metadata, report, shapes, whole_run


@pytest.mark.slow
def test_the_snapshot_benchmark_runs_and_checks_its_own_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.snapshot", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "snapshot.json").read_text())
    assert [row["rank"] for row in written["rows"]] == [1, 16, 64]
    assert written["environment"]["versions"]["torch"]
    assert "| tiny | 64 | 28 |" in done.stdout


def test_metadata_makes_the_plugins_known_without_an_installation(tmp_path: Path) -> None:
    metadata.write_package(tmp_path)
    metadata.write_probe(tmp_path)
    found = {
        (point.group, point.name, point.value)
        for distribution in importlib.metadata.distributions(path=[str(tmp_path)])
        for point in distribution.entry_points
    }
    assert ("vllm.general_plugins", "bucket-lora", "vllm_bucket_lora.plugin:register") in found
    assert ("vllm.general_plugins", "gpu-benchmark-probe", "benchmarks.gpu.probe:register") in found
    assert any(group == "vllm.endpoint_plugins" for group, _, _ in found)


def window(case: str, tokens: float, round_: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": 8, "round": round_, "case": case, "tokens/s": tokens, "loads_ms": [],
        "swaps_ms": [], "gap_p50_ms": 1.0, "gap_p99_ms": 2.0, "gap_max_ms": 3.0, "failed": 0,
        **more,
    }  # fmt: skip


def test_a_change_is_counted_from_the_steady_windows_of_the_same_round() -> None:
    rows = hot_swap.summary(
        [
            window("steady", 100, 0),
            window("steady", 200, 0),
            window("ours:2", 147, 0, loads_ms=[1.0, 9.0, 2.0], swaps_ms=[5.0]),
            window("steady", 50, 1),
            window("ours:2", 49, 1),
        ]
    )
    (ours,) = [row for row in rows if row["case"] == "ours:2"]
    assert ours["change, %"] == pytest.approx(-2.0)
    assert (ours["engine loop blocked, ms"], ours["blocked worst, ms"]) == (2.0, 9.0)
    assert next(row for row in rows if row["case"] == "steady")["change, %"] is None


def test_the_first_steps_of_a_run_do_not_count() -> None:
    steps = [
        {"perf/weight_sync_s": 9.0 if n < whole_run.SKIP else 0.002, "reward": float(n),
         "ratio": 1.0, "perf/step_s": 1.0, "time": float(n)}
        for n in range(10)
    ]  # fmt: skip
    rate = whole_run.TokenRate(server=None)
    rate.samples = [(5.0, 100.0), (9.0, 300.0)]
    figures = whole_run.figures(steps, rate)
    assert figures["optimizer blocked a sync, ms"] == pytest.approx(2.0)
    assert figures["blocked worst, ms"] == pytest.approx(2.0)
    assert figures["generated tokens/s"] == 50.0
    assert (figures["reward first 5"], figures["reward last 5"]) == (2.0, 7.0)


@pytest.mark.slow
def test_a_served_model_has_a_token_for_every_id(tmp_path: Path) -> None:
    """Or the API server's work on the text shows in what is measured."""
    from transformers import AutoTokenizer

    model = shapes.write_served_model(tmp_path, "tiny", "float32")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == shapes.QWEN["tiny"]["vocab_size"]
    texts = [tokenizer.decode([token]) for token in range(256, len(tokenizer) - 1)]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_percentiles() -> None:
    assert report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert report.percentile(list(map(float, range(100))), 99) == 99.0

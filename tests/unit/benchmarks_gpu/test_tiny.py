"""The GPU benchmarks still run, as far as a CPU and seconds go; `--tiny` goes further by hand."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import (
    engine_log,
    hot_swap,
    metadata,
    report,
    shapes,
    swap_profile,
    swap_summary,
    whole_run,
)


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


def window(case: str, tokens: float, at: float, **more: Any) -> dict[str, Any]:
    return {
        "rank": 8, "case": case, "at": at, "seconds": 4.0, "tokens/s": tokens, "loads_ms": [],
        "swaps_ms": [], "lost_ms": [], "gap_p50_ms": 1.0, "gap_p99_ms": 2.0, "gap_max_ms": 3.0,
        "step_p50_ms": 1.0, "step_p99_ms": 2.0, "failed": 0, **more,
    }  # fmt: skip


def test_a_window_is_compared_with_the_steady_ones_around_it() -> None:
    windows = [
        window("steady", 100, at=0),
        window("ours:2", 147, at=5, loads_ms=[1.0, 9.0, 2.0], swaps_ms=[5.0], lost_ms=[40.0]),
        window("steady", 200, at=10),
        window("ours:2", 98, at=19),
        window("steady", 90, at=20),
    ]
    assert swap_summary.change_percent(windows[1], windows) == pytest.approx(-2.0)
    assert swap_summary.change_percent(windows[3], windows) == pytest.approx(-3.0, abs=0.1)
    assert swap_summary.change_percent(windows[0], windows) is None
    steady, ours = swap_summary.summary(windows)
    assert (steady["case"], steady["windows"], ours["windows"]) == ("steady", 3, 2)
    assert (ours["loop blocked, ms"], ours["blocked worst, ms"]) == (2.0, 9.0)
    assert (ours["one every, s"], ours["lost, %"]) == (8.0, 0.5)


def test_an_interval_holds_the_mean_and_narrows_with_more_values() -> None:
    few = swap_summary.mean_and_interval([-1.0, 1.0, 3.0])
    many = swap_summary.mean_and_interval([-1.0, 1.0, 3.0] * 30)
    assert few
    assert many
    assert few[0] == many[0] == 1.0
    assert few[1] < many[1] < 1.0 < many[2] < few[2]
    assert swap_summary.mean_and_interval([]) is None


def test_engine_time_lost_is_counted_from_the_rest_of_the_window() -> None:
    steps = [engine_log.Step(at / 100, 4, 4) for at in range(400)]  # 400 tokens a second
    stalled = [step for step in steps if not 1.0 <= step.at < 1.05]
    window_ = (0.0, 4.0)
    assert engine_log.lost_ms(stalled, [(0.9, 1.4)], window_) == pytest.approx([50.0])
    assert engine_log.lost_ms(steps, [(0.9, 1.4)], window_) == pytest.approx([0.0], abs=1e-6)
    assert engine_log.lost_ms(steps, [(0.0, 3.0)], window_) == []  # too little is left
    assert engine_log.outside([(1, 2), (3, 9)], window_) == [(0.0, 1), (2, 3)]


def test_the_step_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / engine_log.STEPS
    path.write_text("1.0 8 8\n1.5 7 134\n2.0 8 8\n2.25 8")
    steps = engine_log.read_steps(path, since=1.2)
    assert steps == [engine_log.Step(1.5, 7, 134), engine_log.Step(2.0, 8, 8)]
    assert [step.kind for step in steps] == [1, 0]
    assert engine_log.periods_ms(steps) == [500.0]


def test_a_profile_finds_the_slow_steps_before_readiness() -> None:
    window_ = {**window("ours:2", 400, at=0.0), "swaps_ms": [500.0, 500.0]}  # ready at 1.5 and 3.5
    slow = [(1.4, 1.5), (3.4, 3.5)]
    at, steps = 0.0, []
    while at < 4:
        steps.append(engine_log.Step(at, 4, 4))
        at += 0.02 if any(start <= at < end for start, end in slow) else 0.01
    assert swap_profile.readiness(window_) == [1.5, 3.5]
    profile = swap_profile.profile([window_], steps, "ours:2")
    assert profile["lost, ms"][0] == pytest.approx(50, abs=11)
    assert profile["-100 to 0"] == pytest.approx(2, abs=0.2)
    assert profile["-300 to -200"] == pytest.approx(1, abs=0.05)


def test_every_case_has_steady_windows_beside_it() -> None:
    two_rounds = list(itertools.islice(hot_swap.sequence("a:1*2,b:1", "c:2"), 14))
    assert [round_ for round_, _ in two_rounds] == [0] * 7 + [1] * 7
    cases = [case for _, case in two_rounds]
    assert sorted(cases[:7]) == ["a:1", "a:1", "b:1", "c:2", "steady", "steady", "steady"]
    assert all("steady" in cases[max(0, n - 1) : n + 2] for n in range(14))


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

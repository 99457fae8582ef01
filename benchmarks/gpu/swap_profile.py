"""Where in a swap the engine is slower: its steps by their distance from readiness. Pure.

    python -m benchmarks.gpu.swap_profile WINDOWS.jsonl STEPS.txt[.xz]    # as hot_swap wrote them

A step's time is divided by the mean of the same window's steps of the same kind (without a prompt,
or with as many of its tokens) that are not near the end of a swap. So neither the drift of a server
nor the prompts that happen to fall into a swap count, and a few swaps say more than many windows.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import engine_log, report
from benchmarks.gpu.engine_log import Step
from benchmarks.gpu.swap_summary import mean_and_interval

NEAR_S = (-0.30, 0.05)
"""From before preparation begins until after the load: what a swap costs the engine is in there."""

BINS_MS = (-300, -200, -100, 0, 100, 200)
COLUMNS = (
    "case", "swaps", "lost, ms",
    *(f"{start} to {end}" for start, end in itertools.pairwise(BINS_MS)),
)  # fmt: skip


def readiness(window: dict[str, Any]) -> list[float]:
    """When each swap of a window ended: the first is due after half an interval."""
    every_s = float(window["case"].partition(":")[2])
    at = due = window["at"] + every_s / 2
    ends = []
    for ms in window["swaps_ms"]:
        at = max(at, due)
        due = max(due + every_s, at)
        at += ms / 1e3
        ends.append(at)
    return ends


def profile(windows: Sequence[dict[str, Any]], steps: Sequence[Step], case: str) -> dict[str, Any]:
    """Engine time lost near readiness, and how many times as long steps took, by bin."""
    lost: list[float] = []
    ratios: dict[int, list[float]] = {start: [] for start in BINS_MS[:-1]}
    for window in (w for w in windows if w["case"] == case):
        span = (window["at"], window["at"] + window["seconds"])
        timed = [
            (step, after.at - step.at)
            for step, after in itertools.pairwise(engine_log.within(steps, span))
        ]
        ends = readiness(window)
        usual = _usual(timed, ends)
        timed = [(step, took) for step, took in timed if step.kind in usual]
        for end in ends:
            near = [(s, t) for s, t in timed if NEAR_S[0] <= s.at - end < NEAR_S[1]]
            lost.append(sum(took - usual[step.kind] for step, took in near) * 1e3)
            for (step, took), (start, stop) in itertools.product(
                timed, itertools.pairwise(BINS_MS)
            ):
                if start <= (step.at - end) * 1e3 < stop:
                    ratios[start].append(took / usual[step.kind])
    row = {"case": case, "swaps": len(lost), "lost, ms": mean_and_interval(lost)}
    for start, stop in itertools.pairwise(BINS_MS):
        found = ratios[start]
        row[f"{start} to {stop}"] = statistics.fmean(found) if found else None
    return row


def _usual(timed: Sequence[tuple[Step, float]], ends: Sequence[float]) -> dict[int, float]:
    """Mean time of each kind of step away from the swaps' ends."""
    by_kind: dict[int, list[float]] = {}
    for step, took in timed:
        if not any(NEAR_S[0] <= step.at - end < NEAR_S[1] for end in ends):
            by_kind.setdefault(step.kind, []).append(took)
    return {kind: statistics.fmean(times) for kind, times in by_kind.items()}


def main() -> None:
    """Print one row per case."""
    windows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    steps = engine_log.read_steps(Path(sys.argv[2]), since=0)
    cases = dict.fromkeys(w["case"] for w in windows if w["swaps_ms"])
    report.print_table(COLUMNS, [profile(windows, steps, case) for case in sorted(cases)])


if __name__ == "__main__":
    main()

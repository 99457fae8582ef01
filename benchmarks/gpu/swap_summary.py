"""From windows to the table of ``hot_swap``: changes with their uncertainty. Pure.

    python -m benchmarks.gpu.swap_summary WINDOWS.jsonl…     # the table again, of several runs too

A window is compared with the steady windows before and after it, so that a slow drift of the server
cancels out. The interval behind a mean holds 95 % of the means of resampled windows (or swaps).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report

COLUMNS = (
    "rank", "case", "windows", "tokens/s", "change, %", "swaps", "one every, s",
    "engine time lost a swap, ms", "lost, %", "loop blocked, ms", "blocked worst, ms",
    "swap takes, ms", "gap p50, ms", "gap p99, ms", "gap max, ms", "step p50, ms", "step p99, ms",
    "failed",
)  # fmt: skip
STEADY = "steady"
RESAMPLES = 4000


def summary(windows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per rank and case, by rank; the steady windows first."""
    groups = dict.fromkeys((w["rank"], w["case"]) for w in windows)
    order = sorted(groups, key=lambda group: (group[0], group[1] != STEADY, group[1]))
    return [
        row([w for w in windows if (w["rank"], w["case"]) == group], windows) for group in order
    ]


def row(mine: Sequence[dict[str, Any]], windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The windows of one rank and case, among all."""

    def every(name: str) -> list[float]:
        return [value for w in mine for value in w[name]]

    def median(name: str) -> float:
        return float(statistics.median(w[name] for w in mine))

    changes = [c for w in mine if (c := change_percent(w, windows)) is not None]
    swaps, loads, lost = every("swaps_ms"), every("loads_ms"), every("lost_ms")
    apart_s = sum(w["seconds"] for w in mine) / len(swaps) if swaps else None
    return {
        "rank": mine[0]["rank"],
        "case": mine[0]["case"],
        "windows": len(mine),
        "tokens/s": median("tokens/s"),
        "change, %": mean_and_interval(changes),
        "swaps": len(swaps),
        "one every, s": apart_s,
        "engine time lost a swap, ms": mean_and_interval(lost),
        "lost, %": statistics.fmean(lost) / apart_s / 10 if lost and apart_s else None,
        "loop blocked, ms": statistics.median(loads) if loads else None,
        "blocked worst, ms": max(loads, default=None),
        "swap takes, ms": statistics.median(swaps) if swaps else None,
        "gap p50, ms": median("gap_p50_ms"),
        "gap p99, ms": median("gap_p99_ms"),
        "gap max, ms": max(w["gap_max_ms"] for w in mine),
        "step p50, ms": median("step_p50_ms"),
        "step p99, ms": median("step_p99_ms"),
        "failed": sum(w["failed"] for w in mine),
    }


def change_percent(window: dict[str, Any], windows: Sequence[dict[str, Any]]) -> float | None:
    """Throughput against the steady windows next to it, weighed by nearness in time.

    A steady window is compared so, too: what comes out is what chance makes of nothing.
    """
    steady = [
        w for w in windows
        if w["rank"] == window["rank"] and w["case"] == STEADY and w is not window
    ]  # fmt: skip
    before = max((w for w in steady if w["at"] < window["at"]), key=_at, default=None)
    after = min((w for w in steady if w["at"] > window["at"]), key=_at, default=None)
    if before is None or after is None:
        if window["case"] == STEADY or not (before or after):
            return None
        base = (before or after or window)["tokens/s"]
    else:
        share = (window["at"] - before["at"]) / (after["at"] - before["at"])
        base = before["tokens/s"] * (1 - share) + after["tokens/s"] * share
    return float((window["tokens/s"] / base - 1) * 100)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean, and the 95 % interval by bootstrap; ``None`` for no values."""
    if not values:
        return None
    generator = random.Random(0)
    means = sorted(
        statistics.fmean(generator.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = means[int(RESAMPLES * 0.025)], means[int(RESAMPLES * 0.975)]
    return statistics.fmean(values), low, high


def _at(window: dict[str, Any]) -> float:
    return float(window["at"])


def main() -> None:
    """Print the table of windows that were written before."""
    lines = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    report.print_table(COLUMNS, summary([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()

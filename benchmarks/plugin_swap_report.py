"""What the windows of ``plugin_swap_dip`` say: tables of throughput, engine time and CPU time."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.report import percentile
from benchmarks.gpu.swap_summary import mean_and_interval
from benchmarks.plugin_cpu import Used

KINDS = ("quiet", "beside", "swaps")
ENGINE = "engine core, main thread"


@dataclass(frozen=True)
class Window:
    """What was seen in one window."""

    kind: str
    seconds: float
    rate: float
    """Tokens a second of all requests."""
    gaps: list[float]
    """Seconds between the tokens of the streaming clients, ascending."""
    used: Used

    @property
    def rate_with_core(self) -> float:
        """Tokens a second of the time in which the engine's thread had a core or wanted none."""
        return self.rate * self.seconds / (self.seconds - self.used.waited[ENGINE])

    @property
    def blocked(self) -> float:
        """Share of the time in which the engine's thread had nothing to do or waited for a lock."""
        return 1 - (self.used.ran[ENGINE] + self.used.waited[ENGINE]) / self.seconds


def told(window: Window) -> str:
    """A window as a line."""
    gaps = " / ".join(f"{1000 * percentile(window.gaps, share):.0f}" for share in (50, 99, 100))
    rates = f"{window.rate:,.0f} tokens/s, {window.rate_with_core:,.0f} with a core"
    return f"{window.kind} {rates}, gaps {gaps} ms (median, p99, largest)"


def report(windows: Sequence[Window], every_s: float) -> None:
    """Throughput and gaps by kind, then CPU time by group of threads."""
    by_kind = {kind: [w for w in windows if w.kind == kind] for kind in KINDS}
    quiet = by_kind["quiet"]
    print(
        "| windows | tokens/s | less than quiet, % | with a core | less than quiet, % "
        "| engine blocked, % | gaps p99, ms | largest |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kind, of_kind in by_kind.items():
        gaps = sorted(gap for window in of_kind for gap in window.gaps)
        cells = [
            kind,
            f"{statistics.median(w.rate for w in of_kind):,.0f}",
            less([w.rate for w in of_kind], [w.rate for w in quiet]),
            f"{statistics.median(w.rate_with_core for w in of_kind):,.0f}",
            less([w.rate_with_core for w in of_kind], [w.rate_with_core for w in quiet]),
            f"{100 * statistics.median(w.blocked for w in of_kind):.1f}",
            f"{1000 * percentile(gaps, 99):.0f}",
            f"{1000 * gaps[-1]:.0f}",
        ]
        print(f"| {' | '.join(cells)} |")
    for kind in KINDS[1:]:
        cpu_table(kind, quiet, by_kind[kind], every_s)


def cpu_table(
    kind: str, quiet: Sequence[Window], of_kind: Sequence[Window], every_s: float
) -> None:
    """What each group of threads used in quiet windows, in the others, and more for each swap."""
    print(f"\n| threads | quiet, % of a core | {kind} | a swap adds, ms |\n|---|---|---|---|")
    beside_ms = 0.0
    for group in sorted(quiet[0].used.ran):
        before = statistics.median(w.used.ran[group] / w.seconds for w in quiet)
        after = statistics.median(w.used.ran[group] / w.seconds for w in of_kind)
        adds_ms = 1000 * every_s * (after - before)
        if group != ENGINE:
            beside_ms += adds_ms
        print(f"| {group} | {100 * before:.1f} | {100 * after:.1f} | {adds_ms:.1f} |")
    cores = len(os.sched_getaffinity(0))
    share = beside_ms / (10 * every_s * cores)
    print(
        f"beside the engine's thread: {beside_ms:.0f} ms, {share:.1f} % of {cores} cores",
        flush=True,
    )


def less(values: Sequence[float], than: Sequence[float]) -> str:
    """By how many % less, round by round: the mean, and where it lies with 95 %."""
    losses = [100 * (1 - value / other) for value, other in zip(values, than, strict=True)]
    if not any(losses):
        return ""
    interval = mean_and_interval(losses)
    return "{:.1f} ({:.1f} to {:.1f})".format(*interval) if interval else ""

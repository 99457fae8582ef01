"""The demo's closing words: a summary table, and `report.html` with the curves."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.summary import Spread, Summary, series, steps_only


def table_rows(
    summary: Summary, served: Mapping[str, set[int]], sent: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The summary as (what, value) pairs.

    Args:
        summary: Figures of the run.
        served: Versions that were ready on each replica, by its name.
        sent: Generations the proxy sent to each replica, by its name.
    """
    gain = summary.reward_last / summary.reward_first if summary.reward_first else float("inf")
    rows = [
        ("optimizer steps", str(summary.steps)),
        (
            "reward, first → last ten steps",
            f"{summary.reward_first:.3f} → {summary.reward_last:.3f} ({gain:.1f} ×)",
        ),
        (
            "ratio, mean (range)",
            f"{summary.ratio_mean:.4f} ({summary.ratio_min:.3f} to {summary.ratio_max:.3f})",
        ),
        ("syncs (skipped snapshots)", f"{summary.syncs} ({summary.skipped})"),
        ("optimizer blocked by a sync, p50 / p95", _ms(summary.blocked)),
        ("snapshot, p50 / p95", _ms(summary.snapshot)),
        ("publish, p50 / p95", _ms(summary.publish)),
        ("snapshot → ready, p50 / p95", _ms(summary.ready)),
        ("rollouts dropped as stale", str(summary.dropped_stale)),
    ]
    rows += [
        (f"{name}: versions ready, generations", f"{_ranges(versions)}; {sent.get(name, 0)}")
        for name, versions in served.items()
    ]
    return rows


def print_summary(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print the table."""
    table = Table(title="the run", show_header=False)
    for what, value in rows:
        table.add_row(what, value)
    console.print(table)


def write_html(
    path: Path, metrics: Sequence[Mapping[str, Any]], rows: Sequence[tuple[str, str]]
) -> None:
    """Write a page of its own, curves inline."""
    cells = "\n".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(value)}</td></tr>"
        for what, value in rows
    )
    path.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>trl-async-bucket: one run"
        "</title><style>body{font:16px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.2rem 1rem .2rem 0;border-bottom:1px solid #ddd}svg{width:100%;height:auto}"
        f"</style><h1>One run over a bucket</h1><table>{cells}</table>{_curves(metrics)}</html>"
    )


def _curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Reward, versions over time, and sync phases, as one inline SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    steps = steps_only(metrics)
    figure, (reward, versions, phases) = plt.subplots(3, 1, figsize=(9, 10), layout="constrained")
    reward.plot(series(steps, "step"), series(steps, "reward"), color="tab:green")
    reward.set(title="Reward", xlabel="optimizer step", ylabel="mean of a step", ylim=(0, 1))

    start = steps[0]["time"]
    for name, label in (("bucket/version", "snapshot"), ("bucket/ready_version", "ready")):
        timed = [row for row in steps if row.get(name) is not None]
        seconds = [row["time"] - start for row in timed]
        versions.step(seconds, series(timed, name), where="post", label=label)
    versions.set(title="Sync timeline", xlabel="seconds", ylabel="newest policy version")
    versions.legend()

    for name, label in (
        ("bucket/snapshot_s", "snapshot (the optimizer waits)"),
        ("bucket/publish_s", "publish"),
        ("bucket/ready_s", "snapshot → ready"),
    ):
        timed = [row for row in steps if row.get(name) is not None]
        milliseconds = [1000 * value for value in series(timed, name)]
        phases.plot(series(timed, "step"), milliseconds, ".", label=label)
    phases.set(title="Sync phases", xlabel="optimizer step", ylabel="ms", yscale="log")
    phases.legend()

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return "<svg" + buffer.getvalue().partition("<svg")[2]


def _ms(spread: Spread) -> str:
    return f"{1000 * spread.p50:.1f} / {1000 * spread.p95:.1f} ms"


def _ranges(versions: set[int]) -> str:
    """``1-3, 5`` for {1, 2, 3, 5}."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][-1] + 1:
            parts[-1][1:] = [version]
        else:
            parts.append([version])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"

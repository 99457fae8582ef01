"""The plots of the report, as SVG files that say which rows they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.publish_to_ready import PHASES
from benchmarks.report.data import Result, Results
from benchmarks.report.syncs import OURS

SIZE = (8.0, 4.0)


def blocked(axes: Any, *measured: Result) -> None:
    """Blocked time against the file's size, both on a logarithmic scale."""
    for result, line, said in zip(measured, ("-", "--"), ("one process", "two"), strict=True):
        rows = sorted(result.rows, key=lambda row: row["file, MB"])
        size = [row["file, MB"] for row in rows]
        ours = [max(row[name] for name in OURS) for row in rows]
        axes.plot(size, [row["TRL's save, ms"] for row in rows], "C1o" + line, label=f"TRL, {said}")
        axes.plot(size, ours, "C0o" + line, label=f"bucket, {said}")
        if line == "-":
            axes.plot(size, [row["copy, ms"] for row in rows], "C2.:", label="a plain copy")
    axes.set(xscale="log", yscale="log", xlabel="file, MB", ylabel="optimizer blocked, ms")
    axes.legend()


def ready(axes: Any, measured: Result) -> None:
    """Phases of the smallest file one after another, by bucket; a line where the floor is."""
    smallest = min(row["MB"] for row in measured.rows)
    rows = [row for row in reversed(measured.rows) if row["MB"] == smallest]
    names = [row["bucket"] for row in rows]
    left = [0.0] * len(rows)
    for phase in PHASES:
        took = [row[phase] for row in rows]
        axes.barh(names, took, left=left, label=phase)
        left = [a + b for a, b in zip(left, took, strict=True)]
    for place, row in enumerate(rows):
        if row["floor, ms"]:
            axes.plot([row["floor, ms"]] * 2, [place - 0.4, place + 0.4], "k-")
    axes.set(xlabel=f"ms from publish, {smallest} MB; line: floor")
    axes.legend(ncols=2)


def watchers(axes: Any, measured: Result) -> None:
    """First and last replica, by their number."""
    for color, bucket in enumerate(dict.fromkeys(row["bucket"] for row in measured.rows)):
        rows = [row for row in measured.rows if row["bucket"] == bucket]
        count = [row["watchers"] for row in rows]
        for name, line in (("last", "-"), ("first", ":")):
            took = [row[f"commit → ready, {name}, ms"] for row in rows]
            axes.plot(count, took, f"C{color}o{line}", label=f"{bucket}, {name}")
    axes.set(xscale="log", yscale="log", xlabel="replicas", ylabel="commit to ready, ms")
    axes.legend()


def drawings(results: Results) -> dict[str, tuple[Callable[..., None], tuple[Result, ...]]]:
    """File name to what is drawn from what."""
    both = (results["optimizer_blocked"], results["optimizer_blocked_sharded"])
    return {
        "bench-blocked.svg": (blocked, both),
        "bench-ready.svg": (ready, (results["publish_to_ready"],)),
        "bench-watchers.svg": (watchers, (results["growth_watchers"],)),
    }


def drawn_from(measured: tuple[Result, ...]) -> str:
    """What the SVG says of its rows, so that a test can compare without drawing."""
    return "rows " + " ".join(result.digest for result in measured)


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw everything into the folder."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "bench"  # the same figure gives the same file
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, measured) in drawings(results).items():
        figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
        draw(axes, *measured)
        about = {"Date": None, "Description": drawn_from(measured)}
        figure.savefig(folder / name, metadata=about)
        plt.close(figure)
        written.append(folder / name)
    return written

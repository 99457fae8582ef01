"""The results file, and the part of ``docs/reliability.md`` that is written from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.matrix.cells import FAULTS, PHASES, Fault
from tests.faults.matrix.checker import Checks
from tests.faults.matrix.run import RunOutcome

BEGIN = "<!-- written by python -m tests.faults.matrix -->"
END = "<!-- end of what is written -->"


@dataclass
class Results:
    """By cell and by run, as in the file."""

    machine: str = ""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Results:
        """From the file, if it is there."""
        return Results(**json.loads(path.read_text())) if path.exists() else Results()

    def write(self, path: Path) -> None:
        """To the file."""
        document = {"machine": self.machine, "cells": self.cells, "runs": self.runs}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def has(self, key: str) -> bool:
        """Whether the cell was run, and did not fail."""
        return key in self.cells and not self.cells[key]["outcome"].startswith("failed")

    def add(self, outcome: RunOutcome, run_id: str, *, machine: str, took_s: float) -> None:
        """Take in a run, which took so many seconds; cells that were run before are replaced."""
        self.machine = machine
        for result in outcome.results:
            self.cells[result.key] = {
                "outcome": result.outcome,
                "recovery_s": result.recovery_s,
                "restarts": result.restarts,
            }
        checks = outcome.checks
        self.runs[run_id] = {
            "cells": [result.key for result in outcome.results],
            "completions": checks.completions,
            "recomputed": checks.recomputed,
            "largest_difference": checks.largest_difference,
            "told_apart": checks.told_apart,
            "trained": checks.trained,
            "versions": checks.versions,
            "took_s": round(took_s),
            "problems": outcome.problems[:5],
        }


def write_page(page: Path, results: Results) -> None:
    """Replace the written part of the page.

    Raises:
        ValueError: the page has no such part.
    """
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no part between {BEGIN!r} and {END!r}")
    page.write_text(f"{head}{BEGIN}\n\n{written(results)}\n{END}{tail}")


def written(results: Results) -> str:
    """The table, and the sums."""
    lines = [
        f"| fault | hits | {' | '.join(PHASES)} |",
        f"|---|---|{'---|' * len(PHASES)}",
        *(_row(fault, results) for fault in FAULTS),
        "",
        _sums(results),
    ]
    return "\n".join(lines) + "\n"


def _row(fault: Fault, results: Results) -> str:
    shown = [_shown(fault, phase, results) for phase in PHASES]
    return f"| {fault.name}: {fault.what} | {fault.target} | {' | '.join(shown)} |"


def _shown(fault: Fault, phase: str, results: Results) -> str:
    if phase not in fault.phases:
        return "–"
    cell = results.cells.get(f"{fault.key}:{phase}")
    if cell is None:
        return "not run yet"
    seconds = "" if cell["recovery_s"] is None else f", {cell['recovery_s']:.0f} s"
    return f"{cell['outcome'].replace('|', '/')}{seconds}"


def _sums(results: Results) -> str:
    runs = results.runs.values()
    total = {
        name: sum(run[name] for run in runs)
        for name in ("completions", "recomputed", "trained", "versions")
    }
    bad = sum(cell["outcome"].startswith("failed") for cell in results.cells.values())
    apart = sum(run["told_apart"] * run["recomputed"] for run in runs)
    largest = max((run["largest_difference"] for run in runs), default=0.0)
    share = apart / max(total["recomputed"], 1)
    took = [run["took_s"] for run in runs if "took_s" in run]
    minutes = f" They took {sum(took) / 60:.0f} minutes." if 0 < len(took) == len(runs) else ""
    return (
        f"On {results.machine}: {len(results.cells)} cells in {len(results.runs)} training runs, "
        f"{bad} failed. {total['versions']} versions were committed and {total['completions']} "
        f"completions answered; {total['recomputed']} of them were computed again, with a largest "
        f"difference of {largest:.0e} nats, where the next version would have differed by more "
        f"than 1e-3 in {share:.0%} of them. {total['trained']} rollouts were taken for training, "
        f"each of them once.{minutes}"
    )


def shown(checks: Checks) -> str:
    """How much was checked, in a line."""
    return (
        f"{checks.versions} versions, {checks.completions} completions, {checks.recomputed} "
        f"computed again (largest difference {checks.largest_difference:.1e}, told apart "
        f"{checks.told_apart:.0%}), {checks.trained} rollouts trained on"
    )

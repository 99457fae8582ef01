"""Runs cells of the matrix: ``python -m tests.faults.matrix --cells kill:load,corrupt``.

Results are added to a JSON file after each training run, so that what was done before a cut is not
lost, and the table in ``docs/reliability.md`` is written from that file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

from tests.faults.matrix.cells import choose
from tests.faults.matrix.resources import usage
from tests.faults.matrix.run import run_cells
from tests.faults.matrix.table import Results, shown, write_page
from tests.faults.matrix.world import running_world

DOCS = Path(__file__).parents[3] / "docs"


def main() -> int:
    """Run cells; 1 if any failed or was not begun."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--cells", default="all", help="by name or part of it; default all")
    parser.add_argument("--limit-s", type=float, default=3300.0, help="begin no cell after that")
    parser.add_argument("--per-run", type=int, default=10, help="cells that one training run meets")
    parser.add_argument("--hold-factor", type=float, default=1.0, help="below 1: shorter faults")
    parser.add_argument("--missing", action="store_true", help="only cells without a good result")
    cores = f"{os.cpu_count()} CPU cores"
    parser.add_argument("--machine", default=cores, help=f"for the page; default {cores}")
    parser.add_argument("--json", type=Path, help="default docs/reliability.json")
    parser.add_argument("--page", type=Path, help="default docs/reliability.md; none with --json")
    parser.add_argument("--out", type=Path, help="for logs; default a temporary folder")
    options = parser.parse_args()
    if options.json is None:
        options.json = DOCS / "reliability.json"
        options.page = options.page or DOCS / "reliability.md"
    everything = options.cells == "all" and not options.missing
    results = Results() if everything else Results.read(options.json)
    cells = [c for c in choose(options.cells) if not (options.missing and results.has(c.key))]
    begun, good = time.monotonic(), True
    out = options.out or Path(tempfile.mkdtemp(prefix="fault-matrix-"))
    print(f"{len(cells)} cells; logs in {out}", flush=True)
    with running_world(out) as world:
        fresh = usage(world)
        print(f"the fleet is healthy after {time.monotonic() - begun:.0f} s", flush=True)
        while cells and time.monotonic() < begun + options.limit_s:
            run_id = f"run-{len(results.runs) + 1}"
            at = time.monotonic()
            outcome = run_cells(
                world,
                cells[: options.per_run],
                run_id,
                before=fresh,
                hold_factor=options.hold_factor,
                until=begun + options.limit_s,
                say=lambda text: print(text, flush=True),
            )
            met = {result.key for result in outcome.results} or {cells[0].key}
            cells = [cell for cell in cells if cell.key not in met]
            for problem in outcome.problems[:20]:
                print(f"WRONG: {problem}", flush=True)
            good &= not outcome.problems and all(result.good for result in outcome.results)
            took_s = time.monotonic() - at
            results.add(outcome, run_id, machine=options.machine, took_s=took_s)
            results.write(options.json)
            if options.page is not None:
                write_page(options.page, results)
            print(f"{run_id}: {took_s:.0f} s, {shown(outcome.checks)}", flush=True)
    if cells:
        print(f"{len(cells)} cells were not begun: {options.limit_s:.0f} s are over", flush=True)
        good = False
    print("all cells are good" if good else "FAILED", flush=True)
    return 0 if good else 1


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # Like Ctrl-C: it unwinds through the context managers, which end every process.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)

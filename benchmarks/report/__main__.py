"""``python -m benchmarks.report``: read the JSON, write the page's part and the plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import page, plots
from benchmarks.report.data import Results
from benchmarks.results import ROOT

COMMITTED = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=COMMITTED, help="folder of the JSON files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of performance.md")
    options = parser.parse_args()
    results = Results(options.results)
    page.write(options.docs / "performance.md", results)
    for path in plots.draw_all(results, options.docs / "images"):
        print(f"written to {path}")


if __name__ == "__main__":
    main()

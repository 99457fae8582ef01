"""The CPU section of the performance page is what the report makes of the committed figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import page, plots
from benchmarks.report.__main__ import COMMITTED, DOCS
from benchmarks.report.data import Goal, Results


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(COMMITTED)


def test_the_committed_page_is_what_the_report_writes(results: Results) -> None:
    text = (DOCS / "performance.md").read_text()
    assert page.with_written(text, results) == text, "run make bench-report"


def test_every_committed_plot_was_drawn_from_the_committed_rows(results: Results) -> None:
    for name, (_, measured) in plots.drawings(results).items():
        text = (DOCS / "images" / name).read_text()
        assert plots.drawn_from(measured) in text, f"{name} is old; run make bench-report"


def test_every_figure_was_taken_of_a_commit(results: Results) -> None:
    for result in results:
        assert re.fullmatch(r"[0-9a-f]{7,}", result.environment["commit"]), result.source
        assert "--tiny" not in result.environment["command"]


def test_plots_are_drawn(results: Results, tmp_path: Path) -> None:
    for path in plots.draw_all(results, tmp_path):
        assert "</svg>" in path.read_text()


def test_a_page_without_the_marks_is_refused(results: Results) -> None:
    with pytest.raises(ValueError, match="no part between"):
        page.with_written("# Performance\n", results)


def test_a_goal_says_which_rows_miss_it_and_why() -> None:
    assert "Holds in all 3 rows" in str(Goal("x", [], 3, "because"))
    said = str(Goal("x", ["7B by 3 ms"], 3, "Because."))
    assert "Holds in 2 of 3 rows. Missed: 7B by 3 ms. Because." in said

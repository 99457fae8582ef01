from __future__ import annotations

import math
from pathlib import Path

import pytest

from demo.observe import read_metrics
from demo.report import table_rows, write_html
from demo.summary import Summary, spread, summarise


def rows() -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "time": 100.0 + step,
            "reward": step / 100,
            "ratio": 1.0 if step % 2 else 1.02,
            "bucket/version": step,
            "bucket/ready_version": step,
            "bucket/snapshot_s": step / 1000,
            "bucket/publish_s": 0.02,
            "bucket/ready_s": 0.05,
            "bucket/skipped": 3,
            "perf/weight_sync_s": 0.001,
            "sample/dropped_stale_total": 2,
        }
        for step in range(1, 101)
    ]


def summary() -> Summary:
    return summarise([*rows(), {"step": 100, "time": 201.0, "train_runtime": 5.0}])


def test_the_figures_of_a_run() -> None:
    figures = summary()
    assert figures.steps == figures.syncs == 100
    assert figures.reward_first == pytest.approx(0.055)
    assert figures.reward_last == pytest.approx(0.955)
    assert figures.ratio_mean == pytest.approx(1.01)
    assert (figures.ratio_min, figures.ratio_max) == (1.0, 1.02)
    assert (figures.skipped, figures.dropped_stale) == (3, 200)
    assert (figures.snapshot.p50, figures.snapshot.p95) == (0.050, 0.095)


def test_a_spread_of_nothing_is_not_a_number() -> None:
    assert math.isnan(spread([]).p95)


def test_a_run_without_a_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step"):
        summarise([{"step": 0}])


def test_the_table_names_what_each_replica_served() -> None:
    table = dict(table_rows(summary(), {"replica-1": {1, 2, 3, 5}}, {"replica-1": 7}))
    assert table["replica-1: versions ready, generations"] == "1-3, 5; 7"
    assert table["reward, first → last ten steps"] == "0.055 → 0.955 (17.4 ×)"


def test_the_report_is_one_page_with_its_curves(tmp_path: Path) -> None:
    write_html(tmp_path / "report.html", rows(), [("a <b>", "1")])
    page = (tmp_path / "report.html").read_text()
    assert "a &lt;b&gt;" in page
    assert "<svg" in page
    assert "http-equiv" not in page


def test_a_line_that_is_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]

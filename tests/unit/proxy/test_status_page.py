from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.recent_errors import MAX_ERRORS, RecentError, RecentErrors
from bucket_lora_proxy.runs import RunRow
from bucket_lora_proxy.status_page.assets import HEADERS, SCRIPT, STYLE
from bucket_lora_proxy.status_page.history import SAMPLES, History
from bucket_lora_proxy.status_page.page import render
from bucket_lora_proxy.status_page.sparkline import HEIGHT, sparkline
from bucket_lora_proxy.status_page.view import (
    PageView,
    ReplicaRow,
    imbalance,
    version_ranges,
)

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
HOSTILE = "\"'><img src=x onerror=alert(1)>&"


def page(**fields: Any) -> PageView:
    given: dict[str, Any] = {
        "replicas": [],
        "runs": [],
        "note": "",
        "rates": [],
        "span_s": 0.0,
        "affinity": None,
        "imbalance": None,
        "mean_seconds": None,
        "outcomes": {},
        "answers": {},
        "waits": 0.0,
        "retries": {},
    }
    return PageView(**(given | fields))


def test_every_text_on_the_page_is_escaped() -> None:
    """Most of them come from replicas, the bucket, or a client's request."""
    replica = ReplicaRow(
        url=HOSTILE,
        source=HOSTILE,
        state=HOSTILE,
        reason=HOSTILE,
        in_flight=1,
        outstanding=2.0,
        sent=3.0,
        versions=HOSTILE,
        base_model=HOSTILE,
        cached_tokens=4,
    )
    run = RunRow(HOSTILE, HOSTILE, 3, 2, 1, 2, 1, HOSTILE)
    html = render(
        page(
            replicas=[replica],
            runs=[run],
            note=HOSTILE,
            rates=[1.0, 2.0],
            answers={HOSTILE: 1.0},
            retries={HOSTILE: 1.0},
            errors=[RecentError(HOSTILE, HOSTILE, 2, 0.0)],
        ),
        NOW,
    )
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") == 14
    assert not re.search(r'="[^"]*\'>', html)


def test_the_policy_allows_the_inline_style_and_script_and_nothing_else() -> None:
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    html = render(page(), NOW)
    assert f"<style>{STYLE}</style>" in html
    assert f"<script>{SCRIPT}</script>" in html
    assert html.count("<script") == html.count("<style") == 1
    assert not re.search(r"\s(style|on\w+)=", html)
    assert not re.search(r"(src|href)=", html)
    assert '<noscript><meta http-equiv="refresh"' in html


def test_long_texts_are_cut() -> None:
    html = render(page(note="x" * 100_000), NOW)
    assert len(html) < 10_000


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], ""),
        (["run-v3", "run-v4", "run-v5", "run-v9"], "run v3–v5 v9"),
        (["run-v9", "run-v10"], "run v9–v10"),
        (["b-v1", "a-v2", "other"], "a v2; b v1; other"),
    ],
)
def test_versions_are_shown_as_ranges(names: list[str], shown: str) -> None:
    assert version_ranges(names) == shown


def test_imbalance_is_the_largest_share_over_the_mean() -> None:
    assert imbalance([]) is imbalance([0, 0]) is None
    assert imbalance([10, 10]) == 1
    assert imbalance([30, 10, 20]) == 1.5


def test_the_line_runs_from_bottom_to_top() -> None:
    svg = sparkline([0.0, 5.0, 10.0], label="load")
    (line,) = re.findall(r'polyline points="([^"]*)"', svg)
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights == [HEIGHT - 2, HEIGHT / 2, 2]
    assert "polyline" not in sparkline([1.0], label="one value is no line")
    assert "nan" not in sparkline([0.0, 0.0], label="idle")


def test_the_history_is_bounded_and_says_what_the_last_minutes_were_like() -> None:
    now = [0.0]
    metrics = Metrics(Fleet())
    history = History(metrics, clock=lambda: now[0])
    assert (history.rates(), history.affinity(), history.mean_seconds()) == ([], None, None)
    for _ in range(2 * SAMPLES):
        now[0] += 2
        for _ in range(6):
            metrics.requests.add("200")
            metrics.attempts.add("http://a")
            metrics.seconds.observe(0.5)
            metrics.routed("hit", 100, 80)
        history.take()
    assert history.rates() == [3.0] * (SAMPLES - 1)
    assert history.span_s() == 2 * (SAMPLES - 1)
    assert history.affinity() == 0.8
    assert history.mean_seconds() == 0.5
    assert history.sent() == {"http://a": 6 * (SAMPLES - 1)}


def test_equal_errors_are_counted_and_old_ones_forgotten() -> None:
    errors = RecentErrors(clock=lambda: 7.0)
    for _ in range(3):
        errors.add("replica", "reset")
    errors.add("replica", "refused")
    shown = errors.newest_first()
    assert [(error.text, error.count) for error in shown] == [("refused", 1), ("reset", 3)]
    for number in range(100):
        errors.add("replica", "x" * 1000 + str(number))
        errors.add("replica", str(number))
    assert len(errors.newest_first()) == MAX_ERRORS

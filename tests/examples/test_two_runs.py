"""Two trainers side by side while the proxy's status does not come."""

from __future__ import annotations

import pytest

from examples import two_runs_one_fleet
from tests.unit.trl_async_bucket.models import status_server

UP = {"replicas": {"http://r1": {"ready": ["gsm8k-rank1-v2"]}, "http://r2": None}}


def test_a_failed_status_call_ends_no_trainer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trainers = dict.fromkeys(("one", "two"), "tests.examples.short_trainer")
    monkeypatch.setattr(two_runs_one_fleet, "RUNS", trainers)
    monkeypatch.setattr(two_runs_one_fleet, "POLL_S", 0.05)
    with status_server() as server:
        server.answers = [(200, UP), (503, {}), (200, b"<html>"), (200, []), (200, UP)]
        assert two_runs_one_fleet.run_both(server.url, "file:///bucket", None) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == lines[4] == "ready: gsm8k-rank1-v2"
    assert all(line.startswith(f"no status of {server.url}: ") for line in lines[1:4])
    assert lines[5:] == ["one ended with code 0", "two ended with code 0"]


def test_a_proxy_that_is_down_is_named() -> None:
    with status_server() as server:
        pass
    assert two_runs_one_fleet.fleet_line(server.url).startswith(f"no status of {server.url}: ")

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.ready_policy import ANY
from tests.unit.trl_async_bucket.models import StatusServer, status_server
from trl_async_bucket.readiness import ReplicaClient, ReplicasRefused
from trl_async_bucket.server_access import TOKEN_ENV

REPLICA = {
    "replica_id": "r1",
    "base_model": "m",
    "dtype": "bfloat16",
    "max_loras": 8,
    "max_lora_rank": 16,
}


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with status_server() as server:
        yield server


def about(name: str, state: str, reason: str | None = None) -> tuple[int, Any]:
    adapter = {"name": name, "state": state, "reason": reason, "ready_on": int(state == "ready")}
    return 200, {**REPLICA, "adapter": adapter}


def wait(server: StatusServer, timeout_s: float = 10) -> bool:
    return ReplicaClient(server.url).wait_ready("run-v3", policy=ANY, timeout_s=timeout_s)


def test_one_replica_and_a_fleet_are_read_alike(server: StatusServer) -> None:
    server.answers = [(200, REPLICA)]
    assert ReplicaClient(server.url).replicas()[server.url].dtype == "bfloat16"
    server.answers = [(200, {"replicas": {"http://a": REPLICA, "http://b": None}, "errors": {}})]
    assert list(ReplicaClient(server.url).replicas()) == ["http://a"]


def test_a_fleet_without_a_living_replica_says_why(server: StatusServer) -> None:
    fleet = {"replicas": {"http://a": None}, "errors": {"http://a": "connection refused"}}
    server.answers = [(200, fleet)]
    with pytest.raises(StoreUnavailable, match=r"http://a: connection refused"):
        ReplicaClient(server.url).replicas()


def test_a_pending_version_is_waited_for(server: StatusServer) -> None:
    server.answers = [about("run-v3", "pending"), about("run-v3", "ready")]
    assert wait(server)
    query, _ = server.requests[0]
    assert query["adapter"] == ["run-v3"]
    assert query["need"] == ["any"]


def test_a_server_that_answers_at_once_is_not_hammered(server: StatusServer) -> None:
    server.answers = [about("run-v3", "pending")]
    with pytest.raises(StoreUnavailable, match="not ready"):
        wait(server, timeout_s=1.2)
    assert len(server.requests) <= 4


def test_a_refused_version_is_an_error_with_the_replicas_reason(server: StatusServer) -> None:
    server.answers = [about("run-v3", "refused", "rank 64 is above --max-lora-rank 16")]
    with pytest.raises(ReplicasRefused, match="--max-lora-rank 16"):
        wait(server)


def test_an_answer_about_another_version_does_not_count(server: StatusServer) -> None:
    server.answers = [about("run-v2", "ready")]
    with pytest.raises(StoreUnavailable, match=r"asked about run-v3 and answered about run-v2"):
        wait(server, timeout_s=2.0)


def test_the_last_reason_is_in_the_error_when_time_is_up(server: StatusServer) -> None:
    server.answers = [about("run-v3", "pending", "the bucket does not answer")]
    with pytest.raises(StoreUnavailable, match=r"the bucket does not answer.*weight_sync_timeout"):
        wait(server, timeout_s=2.0)


def test_waiting_stops_when_it_is_told_to(server: StatusServer) -> None:
    server.answers = [about("run-v3", "pending")]
    client = ReplicaClient(server.url)
    answers = iter([False, True])
    assert not client.wait_ready(
        "run-v3", policy=ANY, timeout_s=10, should_stop=lambda: next(answers)
    )


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (404, {}, ConfigError, "--plugin bucket-lora"),
        (401, {}, ConfigError, TOKEN_ENV),
        (500, {}, StoreUnavailable, "answers 500"),
        (200, b"<html>", StoreUnavailable, "not answer JSON"),
        (200, {"replica_id": 7}, StoreUnavailable, "is not a ReplicaStatus"),
    ],
)
def test_a_server_that_does_not_speak_status_is_named_with_the_remedy(
    server: StatusServer, status: int, body: Any, error: type[Exception], message: str
) -> None:
    server.answers = [(status, body)]
    with pytest.raises(error, match=message):
        ReplicaClient(server.url).replicas()


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9"):
        ReplicaClient("http://127.0.0.1:9").replicas()


def test_the_token_is_sent_and_never_shown(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "s3cret\n")  # as a file with a last line break gives it
    server.answers = [(500, {})]
    with pytest.raises(StoreUnavailable) as caught:
        ReplicaClient(server.url).replicas()
    assert server.requests[0][1] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv(TOKEN_ENV, "s3cret\nX-Header: 1")
    with pytest.raises(ConfigError) as refused:
        ReplicaClient(server.url)
    assert "s3cret" not in str(refused.value)

"""What the server says of an adapter, alone and as a group of processes."""

from __future__ import annotations

import pytest

from adapter_bucket.manifest import RunState
from adapter_bucket.status import UNREAD, ReadyState
from tests.unit.vllm_bucket_lora.bucket import SERVED
from vllm_bucket_lora.group import RunView, ServerState
from vllm_bucket_lora.status import adapter_status, join, replica_status

VIEW = RunView(
    state=RunState.RUNNING.value,
    latest=7,
    window=3,
    published=[5, 6, 7],
    ready=[5, 6],
    refused={},
    pending={},
)


def state(name: str, view: RunView | None = VIEW) -> tuple[ReadyState, str]:
    server = ServerState(runs={} if view is None else {"run": view})
    answer = adapter_status(name, server, follows=lambda run: run == "run")
    return answer.state, answer.reason or ""


@pytest.mark.parametrize(
    ("name", "expected", "said"),
    [
        ("run-v6", ReadyState.READY, ""),
        ("run-v7", ReadyState.PENDING, "being loaded"),
        ("run-v8", ReadyState.PENDING, "newest version is 7"),
        ("run-v4", ReadyState.RETIRED, "5, 6"),
        ("run-v0", ReadyState.REFUSED, "base model"),
        ("other-v1", ReadyState.REFUSED, "--bucket-lora-runs"),
        ("nonsense", ReadyState.REFUSED, "<run id>-v<version>"),
    ],
)
def test_every_name_gets_its_state(name: str, expected: ReadyState, said: str) -> None:
    found, reason = state(name)
    assert found is expected
    assert said in reason


def test_an_unknown_run_is_waited_for() -> None:
    assert state("run-v1", None)[0] is ReadyState.PENDING


def test_refusals_name_their_reason() -> None:
    whole = VIEW.model_copy(update={"refusal": "another base model", "ready": []})
    assert state("run-v9", whole) == (ReadyState.REFUSED, "another base model")
    one = VIEW.model_copy(update={"refused": {7: "rank 16"}})
    assert state("run-v7", one) == (ReadyState.REFUSED, "rank 16")


def test_why_a_run_is_refused_and_why_it_cannot_be_read_are_two_things() -> None:
    views = {
        "refused": VIEW.model_copy(update={"refusal": "another base model"}),
        "unread": RunView(state=UNREAD, latest=0, window=1, fault="unsigned"),
    }
    runs = replica_status(ServerState(runs=views), SERVED, "r-1").runs
    assert (runs["refused"].refusal, runs["refused"].error) == ("another base model", None)
    unread = runs["unread"]
    assert (unread.state, unread.refusal, unread.error) == ("unread", None, "unsigned")


def test_a_failing_version_is_pending_with_its_reason() -> None:
    failing = VIEW.model_copy(update={"pending": {7: "IntegrityError: sha256"}})
    assert state("run-v7", failing) == (ReadyState.PENDING, "IntegrityError: sha256")


def test_older_versions_of_an_ended_run_are_retired() -> None:
    ended = VIEW.model_copy(update={"state": RunState.FINISHED.value, "ready": [7]})
    assert state("run-v6", ended)[0] is ReadyState.RETIRED
    assert state("run-v7", ended)[0] is ReadyState.READY


def test_a_version_is_ready_only_when_every_process_serves_it() -> None:
    behind = VIEW.model_copy(update={"ready": [4, 5], "latest": 6})
    both = join([ServerState(runs={"run": VIEW}), ServerState(runs={"run": behind})])
    assert both.runs["run"].ready == [5]
    assert both.runs["run"].latest == 7
    assert join([ServerState(runs={"run": VIEW}), None]).runs["run"].ready == []
    assert join([ServerState(runs={"run": VIEW}), ServerState()]).runs["run"].ready == []


def test_a_refusal_by_one_process_is_the_servers() -> None:
    bad = VIEW.model_copy(update={"ready": [5], "refused": {6: "out of memory"}})
    both = join([ServerState(runs={"run": VIEW}), ServerState(runs={"run": bad})])
    assert both.runs["run"].refused == {6: "out of memory"}


def test_a_refusal_that_may_pass_says_so_unless_another_process_refuses_for_good() -> None:
    for_now = VIEW.model_copy(update={"refused": {7: "sha256"}, "retried": [7]})
    good = VIEW.model_copy(update={"refused": {7: "rank 16"}})
    whole = for_now.model_copy(update={"refusal": "another base model"})
    for views, expected in (
        ([for_now, VIEW], True),
        ([for_now, for_now], True),
        ([for_now, good], False),
        ([good], False),
        ([whole], False),
    ):
        server = join([ServerState(runs={"run": view}) for view in views])
        answer = adapter_status("run-v7", server, follows=lambda _: True)
        assert (answer.state, answer.retried) == (ReadyState.REFUSED, expected), views
    told = replica_status(join([ServerState(runs={"run": for_now})]), SERVED, "r-1")
    assert told.runs["run"].retried == [7]


def test_the_status_lists_what_is_ready_and_what_the_server_can_take() -> None:
    status = replica_status(ServerState(runs={"run": VIEW}, fault="denied"), SERVED, "r-1")
    assert status.ready == ["run-v5", "run-v6"]
    assert status.runs["run"].latest == 7
    assert (status.max_loras, status.max_lora_rank, status.error) == (8, 8, "denied")

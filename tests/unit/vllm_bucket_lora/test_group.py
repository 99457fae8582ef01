"""API server processes that tell each other through files."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.manifest import RunState
from vllm_bucket_lora.group import RunView, ServerGroup, ServerState
from vllm_bucket_lora.slots import Admission

STATE = ServerState(
    runs={"run": RunView(state=RunState.RUNNING.value, latest=2, window=3, refused={1: "rank"})},
    holds=["run-v2"],
    admission=Admission(keep={"run": 3}, running=("run",)),
)


def pair(tmp_path: Path) -> tuple[ServerGroup, ServerGroup]:
    return (
        ServerGroup(tmp_path, rank=0, count=2),
        ServerGroup(tmp_path, rank=1, count=2),
    )


def test_a_state_arrives_as_it_was_written(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    assert second.states() == [ServerState(), None]
    first.publish(STATE)
    assert second.states() == [ServerState(), STATE]
    assert second.leaders_admission() == STATE.admission


def test_only_the_first_process_leads(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    assert (first.leader, second.leader) == (True, False)
    assert second.leaders_admission() is None


def test_what_another_process_holds_is_seen(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    first.publish(STATE)
    assert second.held_elsewhere("run-v2")
    assert not first.held_elsewhere("run-v2")
    first.publish(ServerState())
    assert not second.held_elsewhere("run-v2")


def test_changes_and_calls_are_reported_once(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    seen: list[str] = []

    def look() -> list[str]:
        seen.clear()
        second.poll(on_wake=lambda: seen.append("wake"), on_change=lambda: seen.append("change"))
        return list(seen)

    assert look() == []
    first.publish(STATE)
    first.wake_others()
    assert sorted(look()) == ["change", "wake"]
    assert look() == []
    first.wake_others()
    assert look() == ["wake"]


def test_a_single_process_writes_no_files(tmp_path: Path) -> None:
    alone = ServerGroup(tmp_path, rank=0, count=1)
    alone.publish(STATE)
    alone.wake_others()
    assert alone.states() == [STATE]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_state_that_could_not_be_written_is_written_with_the_next_call(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    folder = tmp_path / "servers"
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        first.publish(STATE)
    assert first.states()[0] == STATE
    folder.mkdir()
    first.publish(STATE)
    assert second.states() == [ServerState(), STATE]

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.heartbeat import Heartbeat, write_heartbeat
from adapter_bucket.ready_policy import ALL, ANY, ReadyPolicy
from adapter_bucket.status import ReplicaStatus, RunStatus
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from trl_async_bucket.heartbeat_readiness import HeartbeatReadiness
from trl_async_bucket.readiness import ReplicasRefused


class World:
    """A bucket, a clock that only moves by sleeping, and what happens at which second."""

    def __init__(self, tmp_path: Path) -> None:
        self.store: Store = open_store(f"file://{tmp_path}")
        self.now = 0.0
        self.events: dict[int, Any] = {}
        self.checked: list[set[str]] = []
        self.sequence = 0
        self.fault: str | None = None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if event := self.events.pop(round(self.now), None):
            event()

    def beat(
        self, replica: str, *, ready: list[int], refused: dict[int, str] | None = None
    ) -> None:
        self.sequence += 1
        run = RunStatus(state="running", latest=3, window=3, ready=ready, refused=refused or {})
        status = ReplicaStatus(
            replica_id=replica, base_model="m", dtype="float32", max_loras=8, max_lora_rank=8,
            runs={"run": run},
        )  # fmt: skip
        write_heartbeat(self.store, Heartbeat(
            run_id="run", replica_id=replica, url=f"http://{replica}", sequence=self.sequence,
            interval_s=5, written_at=0, status=status,
        ))  # fmt: skip

    def check(self, replicas: Mapping[str, ReplicaStatus]) -> None:
        if self.fault:
            raise ConfigError(self.fault)
        self.checked.append({status.replica_id for status in replicas.values()})

    def wait(self, policy: ReadyPolicy, *, timeout_s: float = 30) -> bool:
        readiness = HeartbeatReadiness(
            self.store, "run", check=self.check, clock=lambda: self.now, sleep=self.sleep
        )
        return readiness.wait_ready("run-v3", policy=policy, timeout_s=timeout_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_version_is_ready_once_a_heartbeat_says_so(world: World) -> None:
    world.beat("r1", ready=[1, 2])
    world.events[3] = lambda: world.beat("r1", ready=[1, 2, 3])
    assert world.wait(ANY)
    assert world.now == 3


def test_a_quorum_counts_replicas(world: World) -> None:
    world.beat("r1", ready=[3])
    world.beat("r2", ready=[2])
    world.events[4] = lambda: world.beat("r2", ready=[3])
    assert world.wait(ReadyPolicy.parse("quorum:2"))
    assert world.now == 4


def test_a_replica_that_stopped_writing_is_not_waited_for(world: World) -> None:
    world.beat("gone", ready=[2])
    for second in range(1, 30):
        world.events[second] = lambda: world.beat("r1", ready=[3])
    assert world.wait(ALL)
    assert 15 <= world.now <= 17  # three of its intervals


def test_every_new_replica_is_held_against_the_run(world: World) -> None:
    world.beat("r1", ready=[2])
    world.events[2] = lambda: world.beat("r2", ready=[3])
    assert world.wait(ANY)
    assert world.checked == [{"r1"}, {"r1", "r2"}]
    world.fault = "rank 8 is above its limit"
    with pytest.raises(ConfigError, match="rank 8"):
        world.wait(ANY)


def test_a_refusal_is_an_error_with_the_replicas_reason(world: World) -> None:
    world.beat("r1", ready=[], refused={3: "its digest is wrong"})
    with pytest.raises(ReplicasRefused, match="its digest is wrong"):
        world.wait(ANY)


def test_time_is_limited_and_the_last_state_is_told(world: World) -> None:
    with pytest.raises(StoreUnavailable, match=r"no heartbeat of this run|no replica answers"):
        world.wait(ANY, timeout_s=5)
    assert world.now <= 5

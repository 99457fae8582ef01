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
        self.readiness = HeartbeatReadiness(
            self.store, "run", check=self.check, clock=lambda: self.now, sleep=self.sleep
        )
        self.sequence = 0
        self.unfit: set[str] = set()

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
        for url, status in replicas.items():
            if status.replica_id in self.unfit:
                raise ConfigError(f"replica {url}: rank 8 is above its limit")

    def wait(self, policy: ReadyPolicy, *, version: int = 3, timeout_s: float = 30) -> bool:
        return self.readiness.wait_ready(f"run-v{version}", policy=policy, timeout_s=timeout_s)


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


def test_a_replica_that_cannot_serve_the_run_is_refused_at_the_start(world: World) -> None:
    world.unfit = {"r2"}
    world.beat("r1", ready=[2])
    world.events[2] = lambda: world.beat("r2", ready=[])
    with pytest.raises(ConfigError, match=r"http://r2 \(r2\): rank 8"):
        world.wait(ANY)
    assert world.now == 2


@pytest.mark.parametrize("policy", [ANY, ALL, ReadyPolicy.parse("quorum:1")])
def test_one_that_joins_later_is_left_out_and_named_once(
    world: World, caplog: pytest.LogCaptureFixture, policy: ReadyPolicy
) -> None:
    world.unfit = {"r2"}
    world.beat("r1", ready=[2])
    assert world.wait(policy, version=2)
    for second in (0, 30):  # longer apart than it counts as living
        world.events[second] = lambda: world.beat("r2", ready=[], refused={3: "rank 8"})
    for second in range(1, 34):
        world.events[second] = world.events.get(second, lambda: world.beat("r1", ready=[2]))
    world.events[34] = lambda: world.beat("r1", ready=[2, 3])
    world.sleep(0)
    assert world.wait(policy, timeout_s=60)
    assert world.now == 34
    assert caplog.text.count("left out of the run") == 1
    assert "replica http://r2 (r2): rank 8" in caplog.text


def test_one_that_is_left_out_is_never_counted_as_ready(world: World) -> None:
    world.unfit = {"r2"}
    world.beat("r1", ready=[2])
    assert world.wait(ANY, version=2)
    world.beat("r2", ready=[3])
    with pytest.raises(StoreUnavailable, match=r"pending on 0 of 1: .*; left out: replica http"):
        world.wait(ANY, timeout_s=3)


def test_one_that_was_left_out_counts_again_once_it_is_started_anew(world: World) -> None:
    world.unfit = {"r2"}
    world.beat("r1", ready=[2])
    assert world.wait(ANY, version=2)
    world.beat("r2", ready=[])

    def start_anew() -> None:
        world.unfit = set()
        world.beat("r2", ready=[3])

    world.events[3] = start_anew
    assert world.wait(ANY)
    assert world.now == 3


def test_a_refusal_is_an_error_with_the_replicas_reason(world: World) -> None:
    world.beat("r1", ready=[], refused={3: "its digest is wrong"})
    with pytest.raises(ReplicasRefused, match="its digest is wrong"):
        world.wait(ANY)


def test_time_is_limited_and_the_last_state_is_told(world: World) -> None:
    with pytest.raises(StoreUnavailable, match=r"no heartbeat of this run|no replica answers"):
        world.wait(ANY, timeout_s=5)
    assert world.now <= 5

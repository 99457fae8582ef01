"""What the heartbeats in a bucket say, and how often it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adapter_bucket.heartbeat import Seen, remove_heartbeat, write_heartbeat
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.store import Store
from bucket_lora_proxy.membership.heartbeats import (
    MAX_REFUSED,
    QUIET_AFTER_S,
    HeartbeatFollower,
    view_of,
)
from tests.proxy.beating import LOCAL, heartbeat


def seen(url: str, *, unchanged_s: float = 0.0, **fields: Any) -> Seen:
    return Seen(heartbeat(url, **fields), unchanged_s)


def test_a_replica_of_two_runs_is_one_and_lives_as_long_as_either_heartbeat() -> None:
    view = view_of(
        {
            None: {"one": seen("http://127.0.0.1:1", run_id=None, unchanged_s=1e6)},
            "a": {"one": seen("http://127.0.0.1:1", run_id="a", unchanged_s=1e6)},
            "b": {"one": seen("http://127.0.0.1:1/", run_id="b")},
        },
        [LOCAL],
    )
    (found,) = view.replicas.values()
    assert (found.alive, found.runs) == (True, ("a", "b"))


def test_refused_heartbeats_are_bounded_and_told_by_run_and_replica() -> None:
    many = {f"r{n}": seen("http://10.0.0.1:1", replica_id=f"r{n}") for n in range(500)}
    view = view_of({"run": many}, [LOCAL])
    assert len(view.refused) == MAX_REFUSED
    assert view.replicas == {}
    assert "run/r0" in view.refused


class CountingStore(MemoryStore):
    listings = 0

    def list(self, prefix: str) -> Any:
        CountingStore.listings += 1
        return super().list(prefix)


@pytest.mark.parametrize("runs", [[], ["run"]])
def test_an_old_run_is_looked_at_seldom(runs: list[str], now: list[float]) -> None:
    store = CountingStore()
    write_heartbeat(store, heartbeat("http://127.0.0.1:1"))
    follower = follower_of(lambda: store, runs, now)
    assert list(follower.look().replicas) == ["http://127.0.0.1:1"]
    remove_heartbeat(store, "run", "one")
    store.overwrite("runs/run/manifest.json", b"{}")
    now[0] += QUIET_AFTER_S + 1
    follower.look()
    own = 10 if not runs else 0  # of the heartbeats without a run
    CountingStore.listings = 0
    for _ in range(10):
        now[0] += 5
        follower.look()
    assert CountingStore.listings == own
    now[0] += 60
    write_heartbeat(store, heartbeat("http://127.0.0.1:2"))
    assert list(follower.look().replicas) == ["http://127.0.0.1:2"]


def test_only_the_named_runs_are_followed(now: list[float]) -> None:
    store = MemoryStore()
    write_heartbeat(store, heartbeat("http://127.0.0.1:1", run_id="a"))
    write_heartbeat(store, heartbeat("http://127.0.0.1:2", run_id="b"))
    assert len(follower_of(lambda: store, [], now).look().replicas) == 2
    assert list(follower_of(lambda: store, ["b"], now).look().replicas) == ["http://127.0.0.1:2"]


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


def follower_of(
    opener: Callable[[], Store], runs: list[str], now: list[float]
) -> HeartbeatFollower:
    return HeartbeatFollower(
        opener, runs=runs, rules=[LOCAL], poll_s=5, deliver=lambda _: None, clock=lambda: now[0]
    )


def test_a_login_in_a_heartbeats_address_is_shown_nowhere() -> None:
    view = view_of({"run": {"r0": seen("http://x:hidden@127.0.0.1:1")}}, [LOCAL])
    assert view.replicas == {}
    assert "hidden" not in str(view)
    assert "@127.0.0.1:1" in view.refused["run/r0"]

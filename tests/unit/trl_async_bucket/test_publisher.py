from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from adapter_bucket.errors import FencedError, StoreDenied, StoreUnavailable
from trl_async_bucket import publish_retries
from trl_async_bucket.publisher import Publisher
from trl_async_bucket.readiness import RefusedForNow, ReplicasRefused
from trl_async_bucket.sync_record import Snapshot, SnapshotLike

WAIT_S = 20.0


class Buffer:
    """A snapshot buffer of one byte."""

    def data(self) -> bytes:
        return b"x"


@dataclass
class World:
    """The publisher's surroundings: each step can be held back or made to fail."""

    published: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    refusals: dict[int, ReplicasRefused] = field(default_factory=dict)
    """By version: what the wait for it ends with."""
    may_publish: threading.Event = field(default_factory=threading.Event)
    publishing: threading.Event = field(default_factory=threading.Event)
    may_be_ready: threading.Event = field(default_factory=threading.Event)

    def publish(self, snapshot: Snapshot) -> None:
        self.publishing.set()
        assert self.may_publish.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        self.published.append(snapshot.version)

    def wait_ready(self, version: int, _timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        if version in self.refusals:
            raise self.refusals[version]
        while not self.may_be_ready.wait(0.01):
            if should_stop():
                return False
        return True

    def start(self, timeout_s: float = WAIT_S) -> Publisher:
        return Publisher(
            publish=self.publish,
            wait_ready=self.wait_ready,
            on_ready=self.ready.append,
            buffers=(Buffer(), Buffer()),
            timeout_s=timeout_s,
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(publish_retries, "RETRY_FIRST_S", 0.01)
    world = World()
    world.may_publish.set()
    world.may_be_ready.set()
    yield world
    world.may_publish.set()
    world.may_be_ready.set()


def submit(publisher: Publisher, version: int) -> SnapshotLike:
    buffer = publisher.reserve()
    publisher.submit(Snapshot(version, version, buffer, 0.0))
    return buffer


def test_versions_are_published_and_become_ready_in_order(world: World) -> None:
    publisher = world.start()
    for version in (1, 2, 3):
        submit(publisher, version)
        publisher.wait_lag(0, WAIT_S)
    publisher.close(drain=True, timeout_s=WAIT_S)
    assert world.published == world.ready == [1, 2, 3]
    assert [record.version for record in publisher.take_records()] == [1, 2, 3]
    assert publisher.take_records() == []


def test_the_newest_snapshot_wins_and_the_skipped_ones_are_counted(world: World) -> None:
    world.may_publish.clear()
    publisher = world.start()
    active = submit(publisher, 1)
    assert world.publishing.wait(WAIT_S)
    pending = [submit(publisher, version) for version in (2, 3, 4)]
    assert all(buffer is not active for buffer in pending)  # the one being uploaded is not touched
    assert len({id(buffer) for buffer in pending}) == 1
    world.may_publish.set()
    publisher.close(drain=True, timeout_s=WAIT_S)
    assert world.published == [1, 4]
    assert publisher.skipped == 2


def test_rollouts_advance_only_to_a_version_that_is_ready(world: World) -> None:
    world.may_be_ready.clear()
    publisher = world.start()
    submit(publisher, 1)
    with pytest.raises(StoreUnavailable, match="bucket_max_lag"):
        publisher.wait_lag(0, 0.2)
    assert world.published == [1]
    assert world.ready == []
    world.may_be_ready.set()
    publisher.wait_lag(0, WAIT_S)
    assert world.ready == [1]
    publisher.close(drain=True, timeout_s=WAIT_S)


def test_a_store_that_recovers_costs_a_retry_only(world: World) -> None:
    world.failures = [StoreUnavailable("503"), StoreUnavailable("503")]
    publisher = world.start()
    submit(publisher, 1)
    publisher.close(drain=True, timeout_s=WAIT_S)
    assert world.ready == [1]


@pytest.mark.parametrize("error", [StoreDenied("expired"), FencedError("taken"), ValueError("bug")])
def test_what_a_retry_cannot_mend_is_raised_in_the_trainer(world: World, error: Exception) -> None:
    world.failures = [error]
    publisher = world.start()
    submit(publisher, 1)
    with pytest.raises(type(error)):
        publisher.wait_lag(0, WAIT_S)
    with pytest.raises(type(error)):
        publisher.reserve()
    with pytest.raises(type(error)):
        publisher.close(drain=True, timeout_s=WAIT_S)
    assert world.ready == []


def test_a_store_that_stays_away_is_an_error_after_the_time_limit(world: World) -> None:
    world.failures = [StoreUnavailable(f"503 number {n}") for n in range(1000)]
    publisher = world.start(timeout_s=0.2)
    submit(publisher, 1)
    with pytest.raises(StoreUnavailable, match="503"):
        publisher.wait_lag(0, WAIT_S)


def test_an_interrupted_publisher_stops_waiting_and_drops_what_is_pending(world: World) -> None:
    world.may_be_ready.clear()
    publisher = world.start()
    submit(publisher, 1)
    assert world.publishing.wait(WAIT_S)
    submit(publisher, 2)
    publisher.close(drain=False, timeout_s=WAIT_S)
    assert 2 not in world.published
    assert world.ready == []


def test_an_upload_that_does_not_end_is_named_when_closing(world: World) -> None:
    world.may_publish.clear()
    publisher = world.start()
    submit(publisher, 1)
    assert world.publishing.wait(WAIT_S)
    with pytest.raises(StoreUnavailable, match="did not end within"):
        publisher.close(drain=False, timeout_s=0.1)


def test_a_replica_that_does_not_answer_holds_no_interrupted_publisher(world: World) -> None:
    """A status call to a machine that is gone lasts for its whole timeout."""
    world.may_publish.clear()
    answered = threading.Event()
    world.wait_ready = lambda *_: answered.wait(WAIT_S)  # type: ignore[method-assign]
    publisher = world.start()
    submit(publisher, 1)
    assert world.publishing.wait(WAIT_S)
    world.may_publish.set()
    assert publisher.flush(WAIT_S)
    publisher.close(drain=False, timeout_s=0.5)
    answered.set()
    publisher._thread.join(WAIT_S)
    assert world.published == [1]
    assert world.ready == []


def test_flush_publishes_the_newest_and_waits_for_no_replica(world: World) -> None:
    world.may_be_ready.clear()
    publisher = world.start()
    submit(publisher, 1)
    world.publishing.wait(WAIT_S)
    submit(publisher, 2)  # waits behind the readiness of version 1
    assert publisher.flush(WAIT_S)
    assert world.published == [1, 2]
    assert world.ready == []
    publisher.close(drain=False, timeout_s=WAIT_S)


def test_flush_does_not_wait_for_a_status_call_that_hangs(world: World) -> None:
    """A replica whose machine is gone: the call lasts 20 s, the trainer's grace may be shorter."""
    answered, asked = threading.Event(), threading.Event()

    def hang(*_: object) -> bool:
        asked.set()
        return answered.wait(WAIT_S)

    world.wait_ready = hang  # type: ignore[assignment,method-assign]
    publisher = world.start()
    submit(publisher, 1)
    assert asked.wait(WAIT_S)
    submit(publisher, 2)
    assert publisher.flush(WAIT_S / 2)
    assert world.published == [1, 2]
    publisher.close(drain=False, timeout_s=1.0)
    publisher._thread.join(WAIT_S / 2)
    assert not publisher._thread.is_alive()
    answered.set()
    assert world.ready == []


def test_flush_says_what_did_not_get_there(world: World) -> None:
    world.may_publish.clear()
    publisher = world.start()
    assert publisher.flush(0.0)  # nothing was handed over
    submit(publisher, 1)
    assert not publisher.flush(0.05)
    world.failures.append(StoreDenied("no"))
    world.may_publish.set()
    assert not publisher.flush(WAIT_S)


def test_one_damaged_version_is_passed_over_and_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.refusals = {2: RefusedForNow("run-v2 is refused: its sha256 is wrong")}
    publisher = world.start()
    submit(publisher, 1)
    publisher.wait_lag(0, WAIT_S)
    submit(publisher, 2)
    publisher.wait_lag(1, WAIT_S)  # within what is allowed: training goes on
    deadline = time.monotonic() + WAIT_S
    while not publisher.passed_over and time.monotonic() < deadline:
        time.sleep(0.01)
    submit(publisher, 3)
    publisher.close(drain=True, timeout_s=WAIT_S)
    assert world.published == [1, 2, 3]
    assert world.ready == [1, 3]
    assert publisher.passed_over == 1
    assert "version 2 is passed over: run-v2 is refused: its sha256 is wrong" in caplog.text


def test_a_damaged_version_that_the_trainer_waits_for_is_published_again_as_the_next(
    world: World,
) -> None:
    world.refusals = {1: RefusedForNow("damaged")}
    publisher = world.start()
    submit(publisher, 1)
    publisher.wait_lag(0, WAIT_S)
    assert publisher.newest_version == 2
    assert (world.published, world.ready) == ([1, 2], [2])
    for version in (3, 4):  # no buffer is lost
        submit(publisher, version)
        publisher.wait_lag(0, WAIT_S)
    assert world.ready == [2, 3, 4]
    publisher.close(drain=True, timeout_s=WAIT_S)


def test_a_damaged_last_version_is_published_again_as_the_next(world: World) -> None:
    world.refusals = {2: RefusedForNow("damaged")}
    publisher = world.start()
    submit(publisher, 1)
    publisher.wait_lag(0, WAIT_S)
    submit(publisher, 2)
    publisher.close(drain=True, timeout_s=WAIT_S)
    assert (world.published, world.ready) == ([1, 2, 3], [1, 3])


def test_a_second_damaged_version_in_a_row_stops_the_trainer_and_both_are_named(
    world: World,
) -> None:
    world.refusals = {n: RefusedForNow(f"run-v{n} is refused: sha256") for n in (1, 3, 4)}
    publisher = world.start()
    submit(publisher, 1)
    publisher.wait_lag(0, WAIT_S)
    submit(publisher, 3)  # another one was good between them
    with pytest.raises(ReplicasRefused, match=r"two versions in a row.*run-v4.*run-v3"):
        publisher.wait_lag(0, WAIT_S)
    assert world.ready == [2]
    with pytest.raises(ReplicasRefused):
        publisher.reserve()


def test_a_version_refused_for_good_stops_the_trainer_at_once(world: World) -> None:
    world.refusals = {1: ReplicasRefused("run-v1 is refused: rank 16")}
    publisher = world.start()
    submit(publisher, 1)
    with pytest.raises(ReplicasRefused, match="rank 16"):
        publisher.wait_lag(0, WAIT_S)
    assert publisher.passed_over == 0

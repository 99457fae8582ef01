"""The pace of looking at one run, and of trying again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.fetch import RunReader
from adapter_bucket.layout import manifest_key
from adapter_bucket.manifest import RunState
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.store import StoredObject
from tests.unit.vllm_bucket_lora.bucket import SERVED, claim, publish
from vllm_bucket_lora.run import ENDED_POLL_S, FAULTY_AFTER, GONE_AFTER_S, QUIET_POLL_S, Run


def follow(store: MemoryStore, now: float = 0.0) -> Run:
    run = Run("run-a", RunReader(store, "run-a"), SERVED, now, random=lambda: 0.5)
    run.absorb(run.read(), now)
    return run


def interval(run: Run, now: float) -> float:
    run.schedule(now, poll_s=0.5)
    return run.due_at - now


def test_polling_slows_down_without_news_and_is_eager_for_a_waiting_client() -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    run = follow(store)
    assert interval(run, 0.0) == 0.5, "nothing is due while no two versions were seen"
    assert interval(run, 10.0) == 0.5
    assert 0.5 < interval(run, 300.0) < QUIET_POLL_S
    assert interval(run, 10_000.0) == QUIET_POLL_S
    run.waiting = 1
    assert interval(run, 10_000.0) == pytest.approx(0.1)


def test_polling_is_fast_when_the_next_version_is_due_and_never_sleeps_over_that_time() -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    run = follow(store)
    for version, now in ((2, 1_000.0), (3, 1_040.0)):
        publish(writer, version)
        run.absorb(run.read(), now)
    assert run.gap_s == 40.0
    assert interval(run, 1_050.0) == 0.5
    run.schedule(1_050.0, poll_s=30.0)
    assert run.due_at == pytest.approx(1_076.0), "a tenth of the gap early"
    assert interval(run, 1_077.0) == pytest.approx(0.15)
    assert interval(run, 1_047.9 + 40) == pytest.approx(0.15)
    assert interval(run, 1_090.0) == 0.5


@given(st.floats(0, 1))
def test_no_two_replicas_poll_in_step(chance: float) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    run = Run("run-a", RunReader(store, "run-a"), SERVED, 0.0, random=lambda: chance)
    run.absorb(run.read(), 0.0)
    run.schedule(1.0, poll_s=0.5)
    assert run.due_at - 1.0 == pytest.approx(0.5 * (0.8 + 0.4 * chance))


def test_an_ended_run_is_hardly_polled() -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    writer.close(RunState.FINISHED)
    assert interval(follow(store), 0.0) == ENDED_POLL_S


def test_retries_slow_down_and_count_as_refused_after_some() -> None:
    run = follow(MemoryStore())
    assert run.failed(7, "torn", now=0.0)
    assert run.unusable(0.1) == {7}
    assert run.unusable(1.0) == set()
    assert not run.failed(7, "torn", now=1.0)
    assert run.faults() == {}
    for attempt in range(FAULTY_AFTER):
        run.failed(7, "torn", now=10.0 + attempt)
    assert run.faults() == {7: "torn"}


def test_a_manifest_that_vanishes_briefly_changes_nothing() -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    run = follow(store)
    store.delete([manifest_key("run-a")])
    run.absorb(run.read(), 10.0)
    assert run.demand(11.0) is not None
    assert run.demand(11.0 + GONE_AFTER_S) is None


def test_an_outage_after_a_brief_hole_is_no_deletion() -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    run = follow(store)
    kept = store.get(manifest_key("run-a"))
    store.delete([manifest_key("run-a")])
    run.absorb(run.read(), 10.0)
    run.absorb(StoreUnavailable("timed out"), 11.0)
    assert run.demand(20.0 + GONE_AFTER_S) is not None
    run.absorb(run.read(), 21.0 + GONE_AFTER_S)
    assert run.demand(22.0 + GONE_AFTER_S) is not None
    run.absorb(run.read(), 23.0 + 2 * GONE_AFTER_S)
    assert run.demand(23.0 + 2 * GONE_AFTER_S) is None
    run.absorb(StoreUnavailable("timed out"), 24.0 + 2 * GONE_AFTER_S)
    assert run.demand(24.0 + 2 * GONE_AFTER_S) is None  # it does not come back by an outage
    assert isinstance(kept, StoredObject)
    store.create(manifest_key("run-a"), kept.data)
    run.absorb(run.read(), 25.0 + 2 * GONE_AFTER_S)
    assert run.demand(25.0 + 2 * GONE_AFTER_S) is not None


def test_a_fault_of_the_store_is_kept_until_the_next_good_answer() -> None:
    store = MemoryStore()
    run = follow(store)
    assert run.absorb(StoreUnavailable("timed out"), 1.0)
    assert run.fault == "StoreUnavailable: timed out"
    publish(claim(store), 1)
    assert run.absorb(run.read(), 2.0)
    assert run.fault is None


def test_a_run_long_without_news_counts_as_idle() -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    run = follow(store)
    early, late = run.demand(60.0), run.demand(1_000.0)
    assert early is not None
    assert late is not None
    assert (early.idle, late.idle) == (False, True)

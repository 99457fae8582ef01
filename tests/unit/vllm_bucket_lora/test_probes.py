"""Probes and sleep as watcher and status see them; a real engine is tested elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.status import ProbeResult, ReadyState
from tests.unit.vllm_bucket_lora.bucket import PROBE, SERVED, claim, publish
from tests.unit.vllm_bucket_lora.harness import following, watching
from vllm_bucket_lora import metrics
from vllm_bucket_lora.group import RunView, ServerGroup, ServerState
from vllm_bucket_lora.sleep import SleepState, Turn
from vllm_bucket_lora.status import join, replica_status

NONE, PASSED, FAILED = ProbeResult

pytestmark = pytest.mark.anyio


def failures_counted() -> float:
    (family,) = metrics.PROBE_FAILURES.collect()
    return float(family.samples[0].value)


async def test_the_status_says_which_versions_proved_themselves(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1, probe=PROBE)
    publish(writer, 2)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1, 2])
        answer = await bench.service.answer("run-a-v1", 0.0)
        assert answer.runs["run-a"].probes == {1: PASSED, 2: NONE}
        assert answer.adapter is not None
        assert answer.adapter.probe is PASSED


async def test_a_failed_probe_is_refused_reported_once_and_leaves_the_old_version_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted = failures_counted()
    async with following(tmp_path, probe=PROBE) as (bench, writer):
        bench.engine.fail_probes = True
        publish(writer, 2, probe=PROBE)
        answer = await bench.service.answer("run-a-v2", 2.0)
        assert answer.adapter is not None
        assert answer.adapter.state is ReadyState.REFUSED
        assert answer.adapter.probe is FAILED
        assert answer.adapter.reason == "its probe failed: token 2"
        run = answer.runs["run-a"]
        assert (run.ready, run.probes) == ([1], {1: PASSED, 2: FAILED})
        assert "run-a-v2" not in bench.engine.routable
        await asyncio.sleep(0.1)
        assert bench.engine.calls.count("load run-a-v2") == 1
        assert "remove run-a-v2" in bench.engine.calls  # a refused version keeps no slot
        assert failures_counted() == counted + 1
    assert sum("run-a-v2 is refused" in record.getMessage() for record in caplog.records) == 1


async def test_while_the_engine_sleeps_nothing_is_served_and_after_it_all_is_probed_anew(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, probe=PROBE, grace_s=0.05) as (bench, writer):
        await bench.watcher.engine_sleeps()
        assert bench.engine.routable == set()
        publish(writer, 2, probe=PROBE)
        answer = await bench.service.answer("run-a-v2", 0.1)
        assert answer.adapter is not None
        assert answer.adapter.state is ReadyState.PENDING
        assert "sleeps" in (answer.adapter.reason or "")
        assert bench.engine.calls == ["load run-a-v1", "forget run-a-v1", "remove run-a-v1"]
        bench.watcher.engine_wakes()
        await bench.until(lambda: bench.ready() == [1, 2])
        loads = [call for call in bench.engine.calls[3:] if call.startswith("load")]
        assert loads == ["load run-a-v2", "load run-a-v1"]


async def test_a_probe_that_failed_before_a_sleep_gets_a_new_chance(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    async with watching(store, tmp_path) as bench:
        bench.engine.fail_probes = True
        publish(writer, 1, probe=PROBE)
        run = await bench.run()
        await bench.until(lambda: run.probe_failed == {1})
        bench.engine.fail_probes = False
        await bench.watcher.engine_sleeps()
        bench.watcher.engine_wakes()
        await bench.until(lambda: bench.ready() == [1])
        assert not run.refused


def test_the_other_processes_heed_a_sleep_too(tmp_path: Path) -> None:
    groups = [ServerGroup(tmp_path, rank=rank, count=2) for rank in (0, 1)]
    one, other = (SleepState(group) for group in groups)

    def tell(group: ServerGroup, state: SleepState) -> None:
        group.publish(ServerState(slept_at=state.slept_at, woke_at=state.woke_at))

    assert (other.look(), other.asleep) == (Turn.NOTHING, False)
    one.told_to_sleep()
    tell(groups[0], one)
    assert one.look() is Turn.NOTHING  # it has heeded it already
    assert [other.look() for _ in range(2)] == [Turn.FELL_ASLEEP, Turn.NOTHING]
    other.told_to_wake()  # the end is told to another process than the beginning
    tell(groups[1], other)
    assert not one.asleep
    assert [one.look() for _ in range(2)] == [Turn.WOKE, Turn.NOTHING]
    assert other.look() is Turn.WOKE


def test_a_sleep_between_two_looks_is_heeded(tmp_path: Path) -> None:
    groups = [ServerGroup(tmp_path, rank=rank, count=2) for rank in (0, 1)]
    one, other = (SleepState(group) for group in groups)
    one.told_to_sleep()
    one.told_to_wake()
    groups[0].publish(ServerState(slept_at=one.slept_at, woke_at=one.woke_at))
    assert [other.look() for _ in range(2)] == [Turn.WOKE, Turn.NOTHING]


def view(**fields: object) -> RunView:
    return RunView.model_validate(
        {"state": "running", "latest": 2, "window": 2, "published": [1, 2], **fields}
    )


def test_one_process_is_enough_to_fail_a_probe() -> None:
    good = view(ready=[1, 2], probes={1: PASSED, 2: PASSED})
    bad = view(ready=[1], refused={2: "no"}, probes={1: PASSED, 2: FAILED})
    server = join([ServerState(runs={"run": good}), ServerState(runs={"run": bad})])
    run = replica_status(server, SERVED, "r-1").runs["run"]
    assert (run.ready, run.probes) == ([1], {1: PASSED, 2: FAILED})

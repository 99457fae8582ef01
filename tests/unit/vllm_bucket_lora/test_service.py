"""Answers and requests that are held back until they are true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.probe import Probe
from adapter_bucket.status import ReadyState
from tests.unit.vllm_bucket_lora.bucket import adapter_bytes, claim, publish
from tests.unit.vllm_bucket_lora.harness import following, watching
from vllm_bucket_lora.group import ServerState

pytestmark = pytest.mark.anyio


async def test_a_status_is_held_back_until_the_version_is_ready(tmp_path: Path) -> None:
    async with following(tmp_path, poll_s=60.0) as (bench, writer):
        asked = asyncio.create_task(bench.service.answer("run-a-v2", 5.0))
        await asyncio.sleep(0.05)
        assert not asked.done()
        publish(writer, 2)
        answer = await asked
        assert answer.adapter is not None
        assert answer.adapter.state is ReadyState.READY
        assert answer.adapter.ready_on == 1
        assert answer.ready == ["run-a-v1", "run-a-v2"]


async def test_a_status_wait_ends_with_pending(tmp_path: Path) -> None:
    async with watching(MemoryStore(), tmp_path) as bench:
        answer = await bench.service.answer("nowhere-v1", 0.05)
        assert answer.adapter is not None
        assert answer.adapter.state is ReadyState.PENDING


async def test_a_request_waits_for_a_version_that_is_on_its_way(tmp_path: Path) -> None:
    async with following(tmp_path, poll_s=60.0) as (bench, writer):
        publish(writer, 2)
        assert await bench.service.admit_request("run-a-v2") is None
        assert "run-a-v2" in bench.engine.routable


async def test_a_request_for_what_is_not_served_is_told_why(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store, window=1)
    for version in (1, 2):
        publish(writer, version)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [2])
        retired = await bench.service.admit_request("run-a-v1")
        assert retired is not None
        assert (retired.type, retired.code) == ("AdapterRetiredError", 404)
        assert "ready versions: 2" in retired.message
        early = await bench.service.admit_request("run-a-v9")
        assert early is not None
        assert (early.type, early.code) == ("AdapterNotPublishedError", 404)
        publish(writer, 3, use_dora=True)
        refused = await bench.service.admit_request("run-a-v3")
        assert refused is not None
        assert (refused.type, refused.code) == ("AdapterRefusedError", 404)
        assert "use_dora" in refused.message


async def test_a_request_gives_up_on_a_version_that_does_not_come(tmp_path: Path) -> None:
    async with following(tmp_path, request_wait_s=0.1) as (bench, writer):
        blocked = asyncio.Event()

        async def slow_load(name: str, path: Path, probe: Probe | None) -> None:
            await blocked.wait()

        bench.engine.load = slow_load  # type: ignore[method-assign]
        publish(writer, 2)
        late = await bench.service.admit_request("run-a-v2")
        assert late is not None
        assert (late.type, late.code) == ("AdapterNotReadyError", 503)
        blocked.set()


async def test_names_that_are_no_adapters_are_left_to_vllm(tmp_path: Path) -> None:
    async with watching(MemoryStore(), tmp_path) as bench:
        assert await bench.service.admit_request("gpt-4") is None


async def test_a_background_task_that_fails_shows_in_the_status(tmp_path: Path) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with watching(MemoryStore(), tmp_path) as bench:
        bench.service.spawn(broken(), "test")
        await bench.until(lambda: bench.service.status().error is not None)
        assert bench.service.status().error == "bucket-lora-test failed: RuntimeError: a bug"


async def test_the_list_of_versions_says_the_state_of_each(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    publish(writer, 2, use_dora=True)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1])
        bench.engine.in_use["run-a-v1"] = 3
        one, two = bench.service.versions().versions
        assert (one.name, one.state, one.step, one.rank) == ("run-a-v1", ReadyState.READY, 1, 2)
        assert one.weights_bytes == len(adapter_bytes())
        assert two.state is ReadyState.REFUSED
        assert "use_dora" in (two.reason or "")
        assert bench.service.status().in_flight == 3


async def test_the_other_processes_are_followed_again_after_a_fault(tmp_path: Path) -> None:
    async with following(tmp_path, poll_s=60.0, processes=2) as (bench, writer):
        broken = True

        def listener() -> None:
            if broken:
                raise RuntimeError("nobody foresaw this")

        bench.service.listen(listener)
        (tmp_path / "servers" / "1.json").write_text(ServerState().model_dump_json())
        await bench.until(lambda: "nobody foresaw this" in (bench.service.status().error or ""))
        broken = False
        await bench.until(lambda: bench.service.status().error is None)
        await bench.until(lambda: bench.watcher.runs["run-a"].due_at > 0)
        publish(writer, 2)
        (tmp_path / "servers" / "wake-1").write_text("")
        await bench.until(lambda: bench.ready() == [1, 2])

"""What is on its way out: when its slot and its files may go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.store import Store
from tests.unit.vllm_bucket_lora.bucket import claim, publish
from tests.unit.vllm_bucket_lora.harness import FakeEngine
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.group import ServerGroup, ServerState
from vllm_bucket_lora.shelf import GRACE_S, Shelf

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def one_server(root: Path, engine: FakeEngine, now: list[float]) -> AsyncIterator[Shelf]:
    """The shelf of one process that has loaded ``run-a-v1``; ``now[0]`` is the time."""
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    with ThreadPoolExecutor(1) as executor:
        shelf = Shelf(
            engine,
            VersionCache(store, root),
            ServerGroup(root, rank=0, count=1),
            executor=executor,
            on_change=lambda: None,
            clock=lambda: now[0],
        )
        await shelf.load("run-a", writer.manifest.versions[0])
        yield shelf


async def test_the_time_that_a_server_stood_still_is_no_grace(tmp_path: Path) -> None:
    """Else a request that was admitted just before would meet an adapter that is gone."""
    engine, now = FakeEngine(), [100.0]
    async with one_server(tmp_path, engine, now) as shelf:
        now[0] += 5.0
        await shelf.reap()
        await shelf.retire("run-a", 1)
        now[0] += 30.0  # stopped
        await shelf.reap()
        assert shelf.leaving
        engine.in_use["run-a-v1"] = 1  # the request, a moment later
        for _ in range(10):
            now[0] += 0.5
            await shelf.reap()
        assert "remove run-a-v1" not in engine.calls
        engine.in_use.clear()
        await shelf.reap()
        assert "remove run-a-v1" in engine.calls


async def test_a_server_that_keeps_looking_waits_for_the_grace_and_no_longer(
    tmp_path: Path,
) -> None:
    engine, now = FakeEngine(), [100.0]
    async with one_server(tmp_path, engine, now) as shelf:
        await shelf.retire("run-a", 1)
        retired_at = now[0]
        while shelf.leaving:
            now[0] += 0.25
            await shelf.reap()
        assert now[0] - retired_at == GRACE_S


class BusyEngine(FakeEngine):
    """Takes its time to remove an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = asyncio.Event(), asyncio.Event()

    async def remove(self, name: str) -> None:
        self.asked.set()
        await self.free.wait()
        await super().remove(name)


@contextmanager
def two_api_servers(store: Store, root: Path, engine: FakeEngine) -> Iterator[list[Shelf]]:
    """The shelves of two processes in front of one engine, without any grace."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        shelves: list[Shelf] = []
        for rank, executor in enumerate((one, other)):
            group = ServerGroup(root, rank=rank, count=2)

            def tell(rank: int = rank, group: ServerGroup = group) -> None:
                group.publish(ServerState(holds=shelves[rank].names))

            cache = VersionCache(store, root)
            shelf = Shelf(engine, cache, group, executor=executor, on_change=tell, grace_s=0.0)
            shelves.append(shelf)
        yield shelves


async def test_a_process_that_takes_a_version_back_waits_until_it_has_left_the_engine(
    tmp_path: Path,
) -> None:
    """Else it would be ready there, and the other process take it out of the engine."""
    store, engine = MemoryStore(), BusyEngine()
    writer = claim(store)
    publish(writer, 1)
    entry = writer.manifest.versions[0]
    with two_api_servers(store, tmp_path, engine) as (one, other):
        await one.load("run-a", entry)
        await one.retire("run-a", 1)
        reaping = asyncio.create_task(one.reap())
        await engine.asked.wait()
        loading = asyncio.create_task(other.load("run-a", entry))
        await asyncio.wait([loading], timeout=0.2)
        engine.free.set()
        await asyncio.gather(reaping, loading)
        assert engine.calls[-2:] == ["remove run-a-v1", "load run-a-v1"]
        assert other.ready("run-a") == [1]


async def test_a_process_tidies_up_although_another_one_still_serves_the_version(
    tmp_path: Path,
) -> None:
    store, engine = MemoryStore(), FakeEngine()
    writer = claim(store)
    publish(writer, 1)
    entry = writer.manifest.versions[0]
    with two_api_servers(store, tmp_path, engine) as (one, other):
        await one.load("run-a", entry)
        await other.load("run-a", entry)
        await one.retire("run-a", 1)
        await one.reap()
        assert engine.calls[-2:] == ["forget run-a-v1", "tidy run-a-v1"]
        await other.retire("run-a", 1)
        await other.reap()
        assert engine.calls[-2:] == ["tidy run-a-v1", "remove run-a-v1"]


async def test_a_process_that_lets_go_does_not_wait_for_the_fetch_of_another_one(
    tmp_path: Path,
) -> None:
    store, engine = MemoryStore(), FakeEngine()
    writer = claim(store)
    publish(writer, 1)
    entry = writer.manifest.versions[0]
    with two_api_servers(store, tmp_path, engine) as (one, other):
        await one.load("run-a", entry)
        await other.load("run-a", entry)
        with VersionCache(store, tmp_path).turn("run-a", 1):  # as a long fetch
            await one.retire("run-a", 1)
            async with asyncio.timeout(5.0):
                await one.reap()
        assert not one.leaving

"""What is on its way out: when its slot and its files may go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapter_bucket.memory_store import MemoryStore
from tests.unit.vllm_bucket_lora.bucket import claim, publish
from tests.unit.vllm_bucket_lora.harness import FakeEngine
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.group import ServerGroup
from vllm_bucket_lora.shelf import GRACE_S, Shelf

pytestmark = pytest.mark.anyio


async def test_the_time_that_a_server_stood_still_is_no_grace(tmp_path: Path) -> None:
    """Else a request that was admitted just before would meet an adapter that is gone."""
    store, engine, now = MemoryStore(), FakeEngine(), [100.0]
    writer = claim(store)
    publish(writer, 1)
    with ThreadPoolExecutor(1) as executor:
        shelf = Shelf(
            engine,
            VersionCache(store, tmp_path),
            ServerGroup(tmp_path, rank=0, count=1),
            executor=executor,
            on_change=lambda: None,
            clock=lambda: now[0],
        )
        await shelf.load("run-a", writer.manifest.versions[0])
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
    store, engine, now = MemoryStore(), FakeEngine(), [100.0]
    writer = claim(store)
    publish(writer, 1)
    with ThreadPoolExecutor(1) as executor:
        shelf = Shelf(
            engine,
            VersionCache(store, tmp_path),
            ServerGroup(tmp_path, rank=0, count=1),
            executor=executor,
            on_change=lambda: None,
            clock=lambda: now[0],
        )
        await shelf.load("run-a", writer.manifest.versions[0])
        await shelf.retire("run-a", 1)
        retired_at = now[0]
        while shelf.leaving:
            now[0] += 0.25
            await shelf.reap()
        assert now[0] - retired_at == GRACE_S

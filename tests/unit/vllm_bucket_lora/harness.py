"""A watcher over a bucket in memory, with an engine that only remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.probe import Probe
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from adapter_bucket.traces import open_traces
from tests.unit.vllm_bucket_lora.bucket import SERVED, claim, publish
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.group import ServerGroup
from vllm_bucket_lora.ports import LoadRefused, ProbeFailed
from vllm_bucket_lora.run import Run
from vllm_bucket_lora.service import Service
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.watcher import Watcher

TICK_S = 0.005
PATIENCE_S = 30.0
"""Longest time that anything in these tests may take."""


@dataclass
class FakeEngine:
    """A ``Loader``. Records every call in order."""

    calls: list[str] = field(default_factory=list)
    routable: set[str] = field(default_factory=set)
    in_use: dict[str, int] = field(default_factory=dict)
    refuse: dict[str, str] = field(default_factory=dict)
    break_on: set[str] = field(default_factory=set)
    """Names whose load fails in a way that no code foresees."""
    fail_probes: bool = False

    async def load(self, name: str, path: Path, probe: Probe | None) -> None:
        assert (path / "adapter_model.safetensors").is_file()
        if name in self.refuse:
            raise LoadRefused(self.refuse[name])
        if name in self.break_on:
            raise RuntimeError("nobody foresaw this")
        self.calls.append(f"load {name}")
        if probe is not None and self.fail_probes:
            raise ProbeFailed("its probe failed: token 2")
        self.routable.add(name)

    async def forget(self, name: str) -> None:
        self.calls.append(f"forget {name}")
        self.routable.discard(name)

    def in_flight(self, name: str) -> int:
        return self.in_use.get(name, 0)

    def tidy(self, name: str) -> None:
        self.calls.append(f"tidy {name}")

    async def remove(self, name: str) -> None:
        self.calls.append(f"remove {name}")


@dataclass
class Bench:
    """Everything a test looks at."""

    watcher: Watcher
    shelf: Shelf
    engine: FakeEngine
    root: Path
    service: Service

    def ready(self, run_id: str = "run-a") -> list[int]:
        return self.shelf.ready(run_id)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("adapters/*/v*"))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the watcher to bring something about."""
        for _ in range(int(PATIENCE_S / TICK_S)):
            if condition():
                return
            await asyncio.sleep(TICK_S)
        raise AssertionError(f"not within {PATIENCE_S} s; calls: {self.engine.calls}")

    async def run(self, run_id: str = "run-a") -> Run:
        """The run, once the watcher has found it."""
        await self.until(lambda: run_id in self.watcher.runs)
        return self.watcher.runs[run_id]


@asynccontextmanager
async def watching(
    store: Store | None,
    root: Path,
    *,
    served: Served = SERVED,
    pattern: str = "*",
    grace_s: float = 0.0,
    poll_s: float = 0.01,
    request_wait_s: float = 0.2,
    processes: int = 1,
) -> AsyncIterator[Bench]:
    """Run a watcher while the block runs."""
    store = store or MemoryStore()
    engine = FakeEngine()
    group = ServerGroup(root, rank=0, count=processes)
    service = Service(group, served=served, replica_id="r-1", request_wait_s=request_wait_s)
    with ThreadPoolExecutor(1) as executor:
        shelf = Shelf(
            engine,
            VersionCache(store, root),
            group,
            executor=executor,
            on_change=service.publish,
            grace_s=grace_s,
            traces=open_traces("replica", "r-1"),
        )
        watcher = Watcher(
            store,
            shelf,
            group,
            served=served,
            executor=executor,
            pattern=pattern,
            poll_s=poll_s,
            on_change=service.publish,
        )
        service.start(shelf, watcher)
        try:
            yield Bench(watcher, shelf, engine, root, service)
        finally:
            await service.stop()


@asynccontextmanager
async def following(
    root: Path, *, window: int = 3, probe: Probe | None = None, **settings: Any
) -> AsyncIterator[tuple[Bench, RunWriter]]:
    """Run a watcher whose run has version 1, which is ready; with the writer of the next ones.

    Args:
        root: The server's directory.
        window: Of the run.
        probe: Of version 1.
        settings: Of ``watching``.
    """
    store = MemoryStore()
    writer = claim(store, window=window)
    publish(writer, 1, probe=probe)
    async with watching(store, root, **settings) as bench:
        await bench.until(lambda: bench.ready() == [1])
        yield bench, writer

"""The adapters of this process: being loaded, ready, or on their way out.

Owns the order of things. In: claim, fetch, load, ready. Out: no longer routable, then, once no
request uses it, out of the engine, and its files last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from adapter_bucket.json_logs import about
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import VersionEntry
from adapter_bucket.status import ProbeResult
from adapter_bucket.traces import NO_TRACES, Traces
from vllm_bucket_lora import metrics
from vllm_bucket_lora.ports import Cache, Group, Loader

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Least time between "no longer routable" and removal: a request that was just admitted is not yet
counted as in flight."""
LOOK_S = 1.0
"""Most of the grace that passes between two looks: where a server stood still, so did requests."""

T = TypeVar("T")


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


@dataclass
class Held:
    """An adapter that this process uses in some way; its files must stay."""

    run_id: str
    version: int
    phase: Phase = Phase.LOADING
    since: float = 0.0
    waited_s: float = 0.0
    """How much of the grace is over."""
    probe: ProbeResult = ProbeResult.NONE


class Shelf:
    """Loads and lets go of adapters. Used by one task in one event loop."""

    def __init__(
        self,
        loader: Loader,
        cache: Cache,
        group: Group,
        *,
        executor: Executor,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._traces = traces
        self._loader = loader
        self._cache = cache
        self._group = group
        self._executor = executor
        self._on_change = on_change
        self._clock = clock
        self._grace_s = grace_s
        self._looked_at = clock()
        self._held: dict[str, Held] = {}

    @property
    def names(self) -> list[str]:
        """Names of all adapters whose slot or files this process still uses."""
        return sorted(self._held)

    @property
    def runs(self) -> set[str]:
        """Runs of those adapters."""
        return {held.run_id for held in self._held.values()}

    @property
    def leaving(self) -> bool:
        """Whether any adapter is on its way out."""
        return any(held.phase is Phase.LEAVING for held in self._held.values())

    @property
    def in_flight(self) -> int:
        """Requests of this process that are being served with an adapter."""
        return sum(self._loader.in_flight(name) for name in self._held)

    def ready(self, run_id: str) -> list[int]:
        """Versions of the run that this process serves, ascending."""
        return sorted(
            held.version
            for held in self._held.values()
            if held.run_id == run_id and held.phase is Phase.READY
        )

    def probes(self, run_id: str) -> dict[int, ProbeResult]:
        """What became of the probes of the versions that are ready."""
        return {
            version: self._held[adapter_name(run_id, version)].probe
            for version in self.ready(run_id)
        }

    async def load(self, run_id: str, entry: VersionEntry) -> None:
        """Fetch a version and make it ready. One that is on its way out is taken back.

        Raises:
            LoadRefused, BucketError, OSError: as ``Cache.fetch`` and ``Loader.load`` do; the
                adapter is not held then.
        """
        name = adapter_name(run_id, entry.version)
        held = self._held[name] = Held(run_id, entry.version, since=self._clock())
        try:
            self._on_change()  # the others see the claim before the files are used
            path = await self._blocking(lambda: self._cache.fetch(run_id, entry))
            fetched_at = self._clock()
            await self._loader.load(name, path, entry.probe)
        except BaseException:
            held.phase, held.since = Phase.LEAVING, self._clock()
            raise
        loaded_at = self._clock()
        metrics.FETCH_SECONDS.observe(fetched_at - held.since)
        metrics.LOAD_SECONDS.observe(loaded_at - fetched_at)
        metrics.FETCHED_BYTES.inc(entry.weights.size)
        metrics.VERSIONS.labels(metrics.READY).inc()
        logger.info(
            "%s is ready: %d bytes, fetched in %.3f s, loaded in %.3f s%s",
            name, entry.weights.size, fetched_at - held.since, loaded_at - fetched_at,
            " (probe passed)" if entry.probe else "",
            extra=about(run_id, entry.version),
        )  # fmt: skip
        self._traces.record("fetch", name, held.since, fetched_at, bytes=entry.weights.size)
        self._traces.record("load", name, fetched_at, loaded_at)
        held.phase, held.since = Phase.READY, loaded_at
        held.probe = ProbeResult.NONE if entry.probe is None else ProbeResult.PASSED

    async def retire(self, run_id: str, version: int) -> None:
        """Stop serving a version. Its slot and files go later, see ``reap``."""
        name = adapter_name(run_id, version)
        await self._loader.forget(name)
        self._held[name] = Held(run_id, version, Phase.LEAVING, self._clock())
        metrics.VERSIONS.labels(metrics.RETIRED).inc()
        logger.info("%s is retired", name, extra=about(run_id, version))
        self._on_change()

    async def doubt(self) -> None:
        """Assume nothing of the engine any more: what was ready has to be loaded anew."""
        for name, held in list(self._held.items()):
            if held.phase is Phase.READY:
                await self._loader.forget(name)
                # Else adding it again would do nothing: the engine believes that it has it.
                await self._loader.remove(name)
                held.phase, held.since = Phase.LEAVING, self._clock()
        self._on_change()

    async def reap(self) -> None:
        """Free slots and files of retired versions that no request uses any more."""
        now = self._clock()
        look_s, self._looked_at = min(now - self._looked_at, LOOK_S), now
        for name, held in list(self._held.items()):
            if held.phase is not Phase.LEAVING:
                continue
            held.waited_s += min(look_s, now - held.since)
            if held.waited_s < self._grace_s:
                continue
            if self._loader.in_flight(name):
                continue
            # Given up before asking whether others hold it: of two processes that let go at the
            # same time, the second sees that it is the last one.
            del self._held[name]
            try:
                await self._let_go(name, held)
            except BaseException:
                self._held[name] = held  # else its slot and files would stay for ever
                raise

    async def _let_go(self, name: str, held: Held) -> None:
        self._on_change()
        self._loader.tidy(name)
        if self._group.held_elsewhere(name):
            return  # perhaps it is being fetched there: no need to wait for that
        # A process that takes it back says so before it fetches, and then waits for this turn: so
        # either we see it here, or it fetches and loads anew what is gone once the turn is over.
        turn = self._cache.turn(held.run_id, held.version)
        with contextlib.ExitStack() as stack:
            delete = await self._blocking(lambda: stack.enter_context(turn))
            if not self._group.held_elsewhere(name):
                await self._loader.remove(name)
                await self._blocking(delete)

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

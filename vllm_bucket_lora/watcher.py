"""The watcher: when to look at the bucket, what to load, what to let go. Knows nothing of vLLM.

One task does one thing at a time: poll what is due, then load one version, then let go of what is
no longer needed. Every blocking call on the bucket or the disk runs in one thread beside the event
loop. Nothing the bucket does ends the task: versions that are ready stay ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import TypeVar

from adapter_bucket.errors import BucketError, NotPublished
from adapter_bucket.fetch import RunReader, discover_runs
from adapter_bucket.json_logs import about
from adapter_bucket.layout import adapter_name
from adapter_bucket.store import Store
from vllm_bucket_lora import metrics
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.blocking import beside
from vllm_bucket_lora.listing import ListingPace
from vllm_bucket_lora.names import Names
from vllm_bucket_lora.ports import Group, LoadRefused, ProbeFailed
from vllm_bucket_lora.run import Run, next_to_load
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.sleep import SleepState, Turn
from vllm_bucket_lora.slots import Admission, admit, retired

logger = logging.getLogger(__name__)

LEAVING_TICK_S = 0.25
"""How often adapters on their way out are looked at."""
FAULT_PAUSE_S = 1.0
"""Pause after an error of our own, so that it cannot spin."""

T = TypeVar("T")


class Watcher:
    """Follows the runs of one store. Only ``run`` changes ``runs``, ``admission`` and ``fault``."""

    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        group: Group,
        *,
        served: Served,
        executor: Executor,
        pattern: str = "*",
        poll_s: float = 0.5,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._group = group
        self._served = served
        self._executor = executor
        self._pattern = pattern
        self._poll_s = poll_s
        self._on_change = on_change
        self._clock = clock
        self._woken = asyncio.Event()
        self._listing = ListingPace(clock)
        self._names: dict[str, Names] = {}
        self._loading = asyncio.Lock()
        self.sleep = SleepState(group)
        self.runs: dict[str, Run] = {}
        self.admission = Admission()
        self.fault: str | None = None
        """Last fault that concerns no single run."""

    def follows(self, run_id: str) -> bool:
        """Whether the settings let this server serve the run."""
        return fnmatch.fnmatchcase(run_id, self._pattern)

    def wake(self) -> None:
        """Look at everything now."""
        for run in self.runs.values():
            run.due_at = 0.0
        self._listing.hasten()
        self._woken.set()

    def nudge(self) -> None:
        """Decide again, without looking at the bucket: the leader may have decided."""
        self._woken.set()

    async def engine_sleeps(self) -> None:
        """Serve and load nothing until ``engine_wakes``. Returns once nothing is routable.

        A sleeping engine has given its memory away, adapter slots included.
        """
        self.sleep.told_to_sleep()
        try:
            self._on_change()
            async with self._loading:
                await self._shelf.doubt()
        except BaseException:
            self.engine_wakes()  # nobody puts it to sleep now, and so nobody would wake it up
            raise

    def engine_wakes(self) -> None:
        """Load and probe anew what shall be ready: nothing is assumed of what was in the engine."""
        self.sleep.told_to_wake()
        self._on_change()
        self._woken.set()

    @contextlib.contextmanager
    def expecting(self, run_id: str) -> Iterator[None]:
        """While a client waits for a version of the run, poll it eagerly, beginning now."""
        run = self.runs.get(run_id)
        with self._listing.stranger() if run is None else run.awaited():
            self._woken.set()
            yield

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        while True:
            try:
                if not await self.step():
                    await self._sleep()
            except Exception as error:
                # A bug must not silently end the following of all runs.
                logger.exception("the watcher failed; it goes on in %.0f s", FAULT_PAUSE_S)
                self._tell_fault(error)
                await asyncio.sleep(FAULT_PAUSE_S)

    def _tell_fault(self, error: Exception) -> None:
        try:
            self._set_fault(f"{type(error).__name__}: {error}")
        except Exception:  # a disk too full to tell the other processes: it is in the log
            logger.exception("the watcher's fault cannot be told to the other processes")

    async def step(self) -> bool:
        """Poll what is due, load at most one version, let go. Returns whether one was tried."""
        self._woken.clear()
        await self._discover()
        await self._poll()
        await self._decide()
        if await self._heed_sleep():
            return False
        async with self._loading:
            tried = await self._load_next()
        await self._retire()
        await self._shelf.reap()
        return tried

    async def _heed_sleep(self) -> bool:
        """Give up what the engine may have lost, where it slept; whether it sleeps now."""
        turn = self.sleep.look()
        if turn is not Turn.NOTHING:
            await self._shelf.doubt()
        if turn is Turn.WOKE:
            for run in self.runs.values():
                run.doubt()
        return self.sleep.asleep

    async def _discover(self) -> None:
        if not self._listing.begin():
            return
        try:
            found = await self._blocking(lambda: discover_runs(self._store))
        except BucketError as error:
            metrics.POLL_FAULTS.inc()
            self._set_fault(f"{type(error).__name__}: {error}")
            found = []
        else:
            self._set_fault(None)
            self._forget_unwritten(found)
        self._listing.end()
        now = self._clock()
        for run_id in found:
            if run_id not in self.runs and self.follows(run_id):
                names = self._names.setdefault(run_id, Names())
                reader = RunReader(self._store, run_id)
                self.runs[run_id] = Run(run_id, reader, self._served, now, names=names)
                logger.info("following run %s", run_id, extra=about(run_id))

    def _forget_unwritten(self, found: list[str]) -> None:
        """Drop runs that never had a manifest that could be believed, and left the listing."""
        for run in list(self.runs.values()):
            if run.manifest is None and not run.waiting and run.run_id not in found:
                del self.runs[run.run_id]
                self._on_change()

    async def _poll(self) -> None:
        for run in sorted(self.runs.values(), key=lambda run: -run.waiting):
            if run.due_at > self._clock():
                continue
            changed = run.absorb(await self._blocking(run.read), now := self._clock())
            run.schedule(now, self._poll_s)
            for version in run.disowned(self._shelf.ready(run.run_id)):
                await self._shelf.retire(run.run_id, version)  # before anybody is told of the new
            metrics.POLL_FAULTS.inc(bool(run.fault))
            run.tell()
            if run.gone(now) and run.run_id not in self._shelf.runs:
                del self.runs[run.run_id]
                metrics.forget_run(run.run_id)
                logger.info("run %s is gone from the bucket", run.run_id, extra=about(run.run_id))
            if changed:
                self._on_change()

    async def _decide(self) -> None:
        """Give the slots to runs. Only the leader does, or processes could disagree for ever."""
        if self._group.leader:
            new = self._admit()
            if new.refused.keys() - self.admission.refused.keys():
                # A refusal ends a trainer's start. The runs that hold the slots may have ended
                # since they were last looked at, so look before refusing.
                for run_id in new.running:
                    self.runs[run_id].due_at = 0.0
                await self._poll()
                new = self._admit()
        else:
            new = self._group.leaders_admission() or self.admission
        if new == self.admission:
            return
        for run_id, reason in new.refused.items():
            if self.admission.refused.get(run_id) != reason:
                logger.warning("run %s is not served: %s", run_id, reason, extra=about(run_id))
        self.admission = new
        self._on_change()

    def _admit(self) -> Admission:
        demands = [run.demand(self._clock()) for run in self.runs.values()]
        asked = [demand for demand in demands if demand is not None]
        return admit(asked, self._served.max_loras, self.admission.running)

    async def _load_next(self) -> bool:
        choice = next_to_load(self.runs.values(), self._shelf.ready, self._keep, self._clock())
        if choice is None or self.sleep.asleep:
            return False
        run, entry = choice
        name = adapter_name(run.run_id, entry.version)
        try:
            await self._shelf.load(run.run_id, entry)
            run.retries.pop(entry.version, None)
        except LoadRefused as error:
            run.refused[entry.version] = str(error)
            if isinstance(error, ProbeFailed):
                run.probe_failed.add(entry.version)
                metrics.PROBE_FAILURES.inc()
            run.tell()
        except Exception as error:
            # Gone objects mean that the manifest has moved on; all else is worth a retry as well,
            # and what nobody foresaw must not keep other versions from being loaded.
            if not isinstance(error, BucketError | OSError):
                logger.exception("loading %s failed in an unforeseen way", name)
            if isinstance(error, NotPublished):
                run.due_at = 0.0
            reason = f"{type(error).__name__}: {error}"
            metrics.VERSIONS.labels(metrics.FAILED).inc()
            if run.failed(entry.version, reason, self._clock()):
                extra = about(run.run_id, entry.version)
                logger.warning("%s is not loaded: %s", name, reason, extra=extra)
        self._on_change()
        return True

    async def _retire(self) -> None:
        for run_id in self._shelf.runs:
            for version in retired(self._shelf.ready(run_id), self._keep(run_id)):
                await self._shelf.retire(run_id, version)

    def _keep(self, run_id: str) -> int:
        """How many versions of the run may be ready now."""
        run = self.runs.get(run_id)
        if run is None or run.demand(self._clock()) is None:
            return 0
        return self.admission.keep.get(run_id, 0)

    async def _sleep(self) -> None:
        now = self._clock()
        times = [self._listing.next_at, *(run.next_at(now) for run in self.runs.values())]
        if self._shelf.leaving:
            times.append(now + LEAVING_TICK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(times) - now)):
                await self._woken.wait()

    def _set_fault(self, fault: str | None) -> None:
        if fault == self.fault:
            return
        if fault:
            logger.warning("bucket %s: %s", self._store.url, fault)
        self.fault = fault
        self._on_change()

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await beside(self._executor, call, self._set_fault)

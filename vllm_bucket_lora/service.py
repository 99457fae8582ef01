"""One API server process's readiness, as clients, requests and the other processes ask for it.

Holds answers back until they are true, and requests until their version is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import AdapterStatus, ReadyState, ReplicaStatus, VersionList
from vllm_bucket_lora import metrics
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.group import TICK_S, ServerGroup, ServerState
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.status import (
    adapter_status,
    join,
    replica_status,
    version_status,
    view_of,
)
from vllm_bucket_lora.watcher import FAULT_PAUSE_S, Watcher

logger = logging.getLogger(__name__)

UNPUBLISHED_WAIT_S = 1.0
"""Longest wait of a request for a version that is not in the manifest: time for a look or two, as
its commit may be younger than the last poll."""

ASLEEP = "the engine sleeps; versions are loaded again when it wakes up (POST /wake_up)"


@dataclass(frozen=True)
class Rejection:
    """Why a request is not served, in the terms of the OpenAI API's errors."""

    message: str
    type: str
    code: int


class Service:
    """Readiness of this process and of the server. Lives in one event loop."""

    def __init__(
        self,
        group: ServerGroup,
        *,
        served: Served,
        replica_id: str,
        request_wait_s: float = 10.0,
    ) -> None:
        self._group = group
        self._served = served
        self._replica_id = replica_id
        self._request_wait_s = request_wait_s
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._task_fault: str | None = None
        self._group_fault: str | None = None
        """Why the other processes cannot be followed now."""
        self._listeners: list[Callable[[], None]] = []
        self._shelf: Shelf
        self._watcher: Watcher

    def start(self, shelf: Shelf, watcher: Watcher) -> None:
        """Begin to follow the bucket. ``shelf`` and ``watcher`` report to ``publish``."""
        self._shelf, self._watcher = shelf, watcher
        self.spawn(watcher.run(), "watcher")
        if not self._group.alone:
            self.spawn(self._follow_group(), "group")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a background task; if it ever fails, the status says so."""
        task = asyncio.get_running_loop().create_task(work, name=f"bucket-lora-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def stop(self) -> None:
        """End all background tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change here or in another process."""
        self._listeners.append(listener)

    def publish(self) -> None:
        """Tell waiting clients and the other processes that something changed here."""
        watcher, views = self._watcher, {}
        for run in watcher.runs.values():
            view = view_of(run, self._shelf.probes(run.run_id), watcher.admission)
            if view is not None:
                views[run.run_id] = view
                metrics.NEWEST_READY.labels(run.run_id).set(max(view.ready, default=0))
                metrics.NEWEST_PUBLISHED.labels(run.run_id).set(view.latest)
                age_s = time.monotonic() - run.changed_at
                metrics.MANIFEST_CHANGED_AT.labels(run.run_id).set(time.time() - age_s)
        state = ServerState(
            runs=views,
            holds=self._shelf.names,
            admission=watcher.admission,
            fault=watcher.fault
            or self._task_fault
            or self._group_fault
            or (ASLEEP if watcher.sleep.asleep else None),
            slept_at=watcher.sleep.slept_at,
            woke_at=watcher.sleep.woke_at,
        )
        self._group.publish(state)
        self._notify()

    def status(self) -> ReplicaStatus:
        """What the server as a whole serves."""
        server = join(self._group.states())
        status = replica_status(server, self._served, self._replica_id)
        return status.model_copy(update={"in_flight": self._shelf.in_flight})

    def versions(self) -> VersionList:
        """Every version in the window of every run, with its state on the server as a whole."""
        server = join(self._group.states())
        return VersionList(
            replica_id=self._replica_id,
            versions=[
                version_status(run_id, entry, server)
                for run_id, run in sorted(self._watcher.runs.items())
                for _, entry in sorted(run.entries().items())
            ],
        )

    async def answer(self, adapter: str | None, wait_s: float) -> ReplicaStatus:
        """The server's status; with ``adapter``, held back until it is not pending any more."""
        if adapter is None:
            return self.status()

        def about() -> AdapterStatus:
            server = join(self._group.states())
            return adapter_status(adapter, server, follows=self._watcher.follows)

        settled = await self._settle(adapter, about, lambda _: wait_s)
        return self.status().model_copy(update={"adapter": settled})

    async def admit_request(self, name: str) -> Rejection | None:
        """Decide about a request that names an adapter which this process has not loaded.

        Waits while the version is on its way.

        Returns:
            ``None`` if it may go on: the version is loaded now, or the name is no adapter's.
        """
        parsed = parse_adapter_name(name)
        if parsed is None:
            return None

        def about() -> AdapterStatus:
            server = join(self._group.states()[:1])  # this process: it has to serve the request
            return adapter_status(name, server, follows=self._watcher.follows)

        def limit_s(_: AdapterStatus) -> float:
            return self._request_wait_s if self._published(*parsed) else UNPUBLISHED_WAIT_S

        settled = await self._settle(name, about, limit_s)
        metrics.REQUESTS_HELD.labels(settled.state.value).inc()
        if settled.state is ReadyState.READY:
            return None
        return _rejection(settled, published=self._published(*parsed))

    async def _settle(
        self,
        name: str,
        about: Callable[[], AdapterStatus],
        limit_s: Callable[[AdapterStatus], float],
    ) -> AdapterStatus:
        """Ask ``about`` until the answer is not "pending", for at most ``limit_s`` of it."""
        answer, parsed = about(), parse_adapter_name(name)
        if parsed is None or answer.state is not ReadyState.PENDING or limit_s(answer) <= 0:
            return answer
        clock = asyncio.get_running_loop().time
        started_at = clock()
        with self._watcher.expecting(parsed[0]):
            self._group.wake_others()
            while answer.state is ReadyState.PENDING:
                try:
                    async with asyncio.timeout_at(started_at + limit_s(answer)):
                        await self._changed.wait()
                except TimeoutError:
                    if clock() >= started_at + limit_s(answer):  # it may have grown meanwhile
                        break
                answer = about()
        return answer

    def _published(self, run_id: str, version: int) -> bool:
        run = self._watcher.runs.get(run_id)
        return run is not None and run.manifest is not None and version <= run.manifest.latest

    def _notify(self) -> None:
        # Everyone who waits on the old event sees it set; later ones wait on the new one.
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    async def _follow_group(self) -> None:
        while True:
            try:
                self._group.poll(on_wake=self._watcher.wake, on_change=self._group_changed)
                if self._group_fault is not None:
                    self._group_fault = None
                    self._watcher.wake()  # a change may have been seen and not heeded
                    self.publish()
            except Exception as error:  # without it no version would be ready on all of them again
                logger.exception("following the other API servers failed; it goes on")
                self._group_fault = f"{type(error).__name__}: {error}"
                self._tell_group_fault()
                await asyncio.sleep(FAULT_PAUSE_S)
            await asyncio.sleep(TICK_S)

    def _tell_group_fault(self) -> None:
        try:
            self.publish()
        except Exception:  # the others cannot be told, probably for the same reason
            logger.exception("that the other API servers are not followed cannot be told to them")

    def _group_changed(self) -> None:
        self._notify()
        self._watcher.nudge()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("background task %s failed", task.get_name(), exc_info=error)
            self._task_fault = f"{task.get_name()} failed: {type(error).__name__}: {error}"
            self.publish()


_TYPES = {
    ReadyState.RETIRED: "AdapterRetiredError",
    ReadyState.REFUSED: "AdapterRefusedError",
    ReadyState.PENDING: "AdapterNotReadyError",
}


def _rejection(about: AdapterStatus, *, published: bool) -> Rejection:
    message = f"The model `{about.name}` is not served here: {about.reason}."
    if about.state is ReadyState.PENDING and not published:
        return Rejection(message, "AdapterNotPublishedError", 404)
    # Only this one is worth sending again, here or to another replica.
    code = 503 if about.state is ReadyState.PENDING else 404
    return Rejection(message, _TYPES[about.state], code)

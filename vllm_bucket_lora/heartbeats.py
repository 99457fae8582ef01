"""Says in the bucket that this server is there and what it serves, for proxies that look it up.

One process per server writes, now and then: one small object that says that the server is there,
and one per running run, this soon after its list of ready versions changed too. Where the bucket is
read-only for this server, it says so once and serves on: heartbeats are a help, not a condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait

from adapter_bucket.errors import BucketError, StoreDenied
from adapter_bucket.heartbeat import (
    Heartbeat,
    remove_abandoned,
    remove_heartbeat,
    write_heartbeat,
)
from adapter_bucket.manifest import RunState
from adapter_bucket.status import ReplicaStatus
from adapter_bucket.store import Store

logger = logging.getLogger(__name__)

INTERVAL_S = 15.0
"""Seconds between heartbeats without news; a reader calls the server gone after three of them."""
SETTLE_S = 1.0
"""Least seconds between two heartbeats, so that a burst of versions costs one write."""
DENIED_PAUSE_S = 600.0
"""After a refusal for want of permission: somebody may grant it. Only until the first heartbeat was
written: from then on it is no read-only bucket, and a silent server is one that nobody asks."""
GOODBYE_S = 2.0
"""Longest delay of the server's end by taking its heartbeats back."""


class Heart:
    """Writes the heartbeats of one server. Owns its sequence numbers."""

    def __init__(
        self,
        store: Store,
        *,
        replica_id: str,
        url: str,
        status: Callable[[], ReplicaStatus],
        executor: Executor,
        note: Callable[[Iterable[str | None]], None] = lambda alive: None,
        interval_s: float = INTERVAL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._store = store
        self._replica_id = replica_id
        self._url = url
        self._status = status
        self._executor = executor
        self._note_alive = note
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._sequence = 0
        self._alive: set[str | None] = set()
        """Runs, and ``None`` for the server itself, of which a heartbeat may be in the bucket."""
        self._sending: Future[None] | None = None
        self._tidied = False
        self._denied_until = 0.0
        self._may_write = False
        self._news = asyncio.Event()
        self._last_said: object = None
        self.fault: str | None = None
        """Why the last heartbeat was not written."""

    def notice(self) -> None:
        """Something changed; a heartbeat follows soon if it concerns one."""
        runs = self._status().runs
        said = [
            (run_id, run.ready, run.refused, run.refusal, run.error) for run_id, run in runs.items()
        ]
        if said != self._last_said:
            self._last_said = said
            self._news.set()

    async def beat(self) -> None:
        """Write heartbeats until cancelled, then take them back."""
        try:
            while True:
                try:
                    await self.write()
                except Exception as error:  # whatever it was: the next one may pass
                    self._note(error)
                await asyncio.sleep(self._settle_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._interval_s - self._settle_s)):
                        await self._news.wait()
                self._news.clear()
        finally:
            self._say_goodbye()

    async def write(self) -> None:
        """Write the server's own and one per running run; take back those of ended runs."""
        if time.monotonic() < self._denied_until:
            return
        status = self._status()
        running = {r for r, run in status.runs.items() if run.state == RunState.RUNNING.value}
        self._sequence += 1
        current: list[str | None] = [None, *sorted(running)]
        beats = [self._heartbeat(run_id, status) for run_id in current]
        ended = [run_id for run_id in self._alive if run_id not in current]
        loop = asyncio.get_running_loop()
        try:
            if set(current) - self._alive:  # before there is one that nobody would take back
                self._alive.update(current)
                self._write_down(self._alive)
            self._sending = self._executor.submit(self._send, beats, ended)
            await asyncio.wrap_future(self._sending)
        except BucketError as error:
            self._note(error)
        else:
            self.fault = None
            self._may_write = True
            self._alive = set(current)
        if not self._tidied:
            self._tidied = True
            await loop.run_in_executor(self._executor, self._tidy)

    def _write_down(self, alive: Iterable[str | None]) -> None:
        try:
            self._note_alive(alive)
        except OSError as error:  # rather one that has to expire than a server that nobody finds
            logger.warning("heartbeats are not noted for the server's end: %s", error)

    def _tidy(self) -> None:
        try:
            remove_abandoned(self._store)
        except BucketError as error:  # somebody with the permission, or the next start, does it
            logger.info("heartbeats of replicas that are gone stay: %s", error)

    def _send(self, beats: list[Heartbeat], ended: Iterable[str | None]) -> None:
        for beat in beats:
            write_heartbeat(self._store, beat)
        for run_id in ended:
            remove_heartbeat(self._store, run_id, self._replica_id)

    def _heartbeat(self, run_id: str | None, status: ReplicaStatus) -> Heartbeat:
        own = {} if run_id is None else {run_id: status.runs[run_id]}
        ready = [name for name in status.ready if name.rpartition("-v")[0] in own]
        return Heartbeat(
            run_id=run_id,
            replica_id=self._replica_id,
            url=self._url,
            sequence=self._sequence,
            interval_s=self._interval_s,
            written_at=time.time(),
            status=status.model_copy(update={"runs": own, "ready": ready}),
        )

    def _note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self.fault:
            unforeseen = None if isinstance(error, BucketError) else error
            logger.warning("no heartbeat: %s", text, exc_info=unforeseen)
        self.fault = text
        if isinstance(error, StoreDenied) and not self._may_write:
            self._denied_until = time.monotonic() + DENIED_PAUSE_S

    def _say_goodbye(self) -> None:
        # A thread that nobody waits for longer than this: an absent bucket must not hold the
        # server's end up, and a reader notices the silence anyway.
        def take_back() -> None:
            if self._sending is not None:  # it would write them again
                wait([self._sending])
            try:
                self._send([], self._alive)
                self._write_down(set())
            except BucketError as error:
                logger.warning("heartbeats stay until they expire: %s", error)

        if self._alive:
            thread = threading.Thread(target=take_back, name="bucket-lora-goodbye", daemon=True)
            thread.start()
            thread.join(GOODBYE_S)

"""The background publisher: from a filled snapshot to a version that rollouts may ask for.

Owns the background thread that publishes and the hand-over to it. Newest wins: of snapshots that
arrive while one is being published only the last is kept, so there are never more than two buffers.
A version advances the rollouts only when it is ready. Where one is passed over (``version_wait``)
and the trainer waits for it, its weights are published again, under the next number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.json_logs import about
from trl_async_bucket.publish_retries import publish_with_retries
from trl_async_bucket.sync_record import Snapshot, SnapshotLike, SyncRecord, SyncTimes
from trl_async_bucket.version_wait import VersionWait, Waited, WaitReady

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes snapshots one at a time on a thread of its own.

    The trainer's thread calls ``reserve``, ``submit``, ``wait_lag`` and ``close``; everything else
    happens on the publisher's thread, or, waiting for readiness, on one beside it. An error there
    stops the publisher and is raised in the trainer's next call: nothing is skipped in silence.

    Args:
        publish: Commits one snapshot to the bucket. Called again after ``StoreUnavailable``.
        wait_ready: Blocks until the version is ready; false if asked to stop. One that raises
            ``RefusedForNow`` is passed over, if the one before was not.
        on_ready: Told every version that is ready, in ascending order.
        buffers: Two buffers, owned by the publisher from now on.
        timeout_s: Longest time for one version, retries and readiness included.
        on_synced: Told when each part of a finished sync ended.
    """

    def __init__(
        self,
        *,
        publish: Callable[[Snapshot], None],
        wait_ready: WaitReady,
        on_ready: Callable[[int], None],
        buffers: tuple[SnapshotLike, SnapshotLike],
        timeout_s: float,
        on_synced: Callable[[SyncTimes], None] = lambda times: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_synced = on_synced
        self._publish = publish
        self._wait_ready = VersionWait(wait_ready)
        self._on_ready = on_ready
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._free: list[SnapshotLike] = list(buffers)
        self._pending: Snapshot | None = None
        self._passed: Snapshot | None = None
        """The newest snapshot, if it was passed over."""
        self._error: BaseException | None = None
        self._stopping = self._aborted = self._hurried = self._writing = False
        self._submitted_version = self._committed_version = self._ready_version = 0
        self._skipped = self._passed_over = 0
        self._records: list[SyncRecord] = []
        self._thread = threading.Thread(target=self._run, name="bucket-publisher", daemon=True)
        self._thread.start()

    @property
    def skipped(self) -> int:
        """Snapshots replaced by a newer one before they were published."""
        with self._changed:
            return self._skipped

    @property
    def passed_over(self) -> int:
        """Versions that were published and that no replica could verify."""
        with self._changed:
            return self._passed_over

    @property
    def newest_version(self) -> int:
        """Number under which the newest snapshot is published; the trainer's next is greater."""
        with self._changed:
            return self._submitted_version

    @property
    def ready_version(self) -> int:
        """Newest version that is ready; 0 before the first."""
        with self._changed:
            return self._ready_version

    def reserve(self) -> SnapshotLike:
        """A buffer to fill. A snapshot still waiting gives up its buffer: the newest wins.

        Raises:
            ConfigError: the publisher is closed.
            Exception: whatever stopped the publisher.
        """
        with self._changed:
            self._raise_error()
            if self._stopping:
                raise ConfigError("a snapshot was taken after the bucket sync had ended")
            if self._pending is not None:
                logger.info(
                    "snapshot of version %d is skipped: the bucket is slower than the trainer",
                    self._pending.version,
                    extra=about(version=self._pending.version),
                )
                self._free.append(self._pending.buffer)
                self._pending = None
                self._skipped += 1
            return self._free.pop()

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a filled buffer that ``reserve`` gave out. Does not block."""
        with self._changed:
            if self._passed is not None:
                self._free.append(self._passed.buffer)
                self._passed = None
            self._pending = snapshot
            self._submitted_version = snapshot.version
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest snapshot is in the bucket, ready or not; says whether it is.

        Afterwards readiness is not waited for any more: the trainer is about to end.
        """
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error or self._committed_version >= self._submitted_version,
                timeout=timeout_s,
            )
            return self._committed_version >= self._submitted_version

    def wait_lag(self, max_lag: int, timeout_s: float) -> float:
        """Wait until the newest snapshot is at most ``max_lag`` ahead of the ready version.

        Should it be passed over meanwhile, it gets the next number (``newest_version``).

        Returns:
            Seconds waited.

        Raises:
            StoreUnavailable: still further ahead after ``timeout_s``.
            Exception: whatever stopped the publisher.
        """
        started = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: self._caught_up(max_lag), timeout=timeout_s)
            self._raise_error()
            if self._submitted_version - self._ready_version > max_lag:
                raise StoreUnavailable(
                    f"version {self._submitted_version} waits for the bucket or the replicas for "
                    f"{timeout_s:.0f} s: the newest ready version is {self._ready_version}, and "
                    f"at most {max_lag} versions of lag are allowed (bucket_max_lag; none at the "
                    "first sync). Look for the cause in the publisher's log above; raise "
                    "weight_sync_timeout if the bucket is only slow"
                )
        return self._clock() - started

    def _caught_up(self, max_lag: int) -> bool:
        if self._error or self._submitted_version - self._ready_version <= max_lag:
            return True
        self._publish_again()
        return False

    def _publish_again(self) -> None:
        """Hand over anew what was passed over. Only while the trainer waits or has ended: numbers
        are given out by it, and none must be given twice."""
        if self._passed is not None:
            self._pending = replace(self._passed, version=self._passed.version + 1)
            self._submitted_version = self._pending.version
            self._passed = None
            self._changed.notify_all()

    def check(self) -> None:
        """Raise whatever stopped the publisher, if anything did."""
        with self._changed:
            self._raise_error()

    def take_records(self) -> list[SyncRecord]:
        """Records of the syncs finished since the last call."""
        with self._changed:
            records, self._records = self._records, []
            return records

    def close(self, *, drain: bool, timeout_s: float) -> None:
        """Stop the thread.

        Args:
            drain: Publish what is pending first; otherwise drop it, and only see an upload out: a
                call may still wait for a replica's answer, but nothing is written any more.
            timeout_s: How long to wait for the thread.

        Raises:
            StoreUnavailable: the thread did not end in time, or still writes.
            Exception: what stopped the publisher, if ``drain``.
        """
        with self._changed:
            self._stopping = True
            self._aborted = not drain
            if not drain:
                self._pending = None
            self._changed.notify_all()
            if not drain:
                self._changed.wait_for(lambda: not self._writing, timeout=timeout_s)
                busy = self._writing
        if drain:
            self._thread.join(timeout_s)
            self.check()
            busy = self._thread.is_alive()
        if busy:
            raise StoreUnavailable(
                f"the publisher did not end within {timeout_s:.0f} s; the newest ready version is "
                f"{self._ready_version}"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._stopping)
                if self._pending is None and not self._aborted:
                    self._publish_again()  # nothing newer follows
                if self._pending is None:
                    return
                active, self._pending, self._writing = self._pending, None, True
            try:
                record = self._sync(active)
            except BaseException as error:  # the thread's boundary: raised again in the trainer
                logger.error(
                    "publishing version %d failed: %s", active.version, error,
                    extra=about(version=active.version),
                )  # fmt: skip
                with self._changed:
                    self._error, self._writing = error, False
                    self._changed.notify_all()
                return
            with self._changed:
                if self._passed is not active:
                    self._free.append(active.buffer)
                if record is not None:
                    self._records.append(record)
                    self._ready_version = record.version
                self._changed.notify_all()

    def _sync(self, snapshot: Snapshot) -> SyncRecord | None:
        deadline = self._clock() + self._timeout_s
        started = self._clock()
        self._commit(snapshot, deadline)
        committed_at = self._clock()
        publish_s = committed_at - started
        remaining = max(deadline - committed_at, 1.0)
        waited = self._wait_ready(
            snapshot.version, remaining, lambda: self._aborted or self._hurried
        )
        if waited is Waited.PASSED_OVER:
            self._pass_over(snapshot)
        if waited is not Waited.READY or self._aborted:
            return None
        ready_at = self._clock()
        ready_s = ready_at - snapshot.taken_at
        # Only now: a version that rollouts ask for must be one the replicas have.
        self._on_ready(snapshot.version)
        nbytes = memoryview(snapshot.buffer.data()).nbytes
        record = SyncRecord(snapshot.version, nbytes, publish_s, ready_s)
        record.log()
        self._on_synced(SyncTimes(snapshot, started, committed_at, ready_at))
        return record

    def _pass_over(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._passed_over += 1
            if self._submitted_version == snapshot.version:
                self._passed = snapshot

    def _commit(self, snapshot: Snapshot, deadline: float) -> None:
        publish_with_retries(
            partial(self._publish, snapshot),
            version=snapshot.version,
            give_up_before=lambda pause_s: self._aborted or self._clock() + pause_s > deadline,
            pause=self._pause,
        )
        with self._changed:
            self._committed_version, self._writing = snapshot.version, False
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._aborted, timeout=seconds)

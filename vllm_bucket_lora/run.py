"""One run as the watcher follows it: its manifest, when to look again, what failed.

Owns the pace of polling and of retries. Does no loading.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from adapter_bucket.errors import BucketError, NotPublished
from adapter_bucket.fetch import RunReader
from adapter_bucket.json_logs import about
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import Manifest, RunState, VersionEntry
from vllm_bucket_lora import metrics
from vllm_bucket_lora.acceptance import Served, run_fault, version_fault
from vllm_bucket_lora.names import Names, reused_fault
from vllm_bucket_lora.slots import Demand, to_load

logger = logging.getLogger(__name__)

EAGER_POLL_S = 0.1
"""While a client waits for a version: its commit may be a moment away."""
EXPECTED_POLL_S = 0.15
"""Around the time at which the next version is due, if the last two are a guide."""
EXPECTED_MARGIN = 0.1
"""Share of the gap between two versions by which the next may be early, or twice that late."""
QUIET_AFTER_S = 60.0
"""Without news for this long, a run is polled less and less often …"""
QUIET_POLL_S = 5.0
"""… down to this. A client that waits still gets an immediate poll."""
ENDED_POLL_S = 30.0
"""Ended runs are polled only to notice that they were taken up again."""
JITTER = 0.2
"""Share by which every interval varies, so that replicas do not poll in step."""

IDLE_AFTER_S = 120.0
"""A running run without news for this long, and for four times its usual gap, may be dead."""
GONE_AFTER_S = 60.0
"""A manifest missing for this long was deleted; a mount may show a hole for up to 30 s."""

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
FAULTY_AFTER = 3
"""Failed attempts after which a version counts as refused. It is still retried, slowly."""


@dataclass
class Retry:
    """A version that failed, and when it is tried again."""

    reason: str
    due_at: float
    attempts: int = 1


@dataclass
class Run:
    """What is known of one run. Times are seconds of the watcher's clock."""

    run_id: str
    reader: RunReader
    served: Served
    first_seen_at: float
    random: Callable[[], float] = random.random
    names: Names = field(default_factory=Names)
    manifest: Manifest | None = None
    changed_at: float = 0.0
    gap_s: float = 0.0
    """Time between the last two new versions, as seen here; 0 while there were no two."""
    due_at: float = 0.0
    waiting: int = 0
    """Clients that wait for a version of this run."""
    missing_since: float | None = None
    fault: str | None = None
    """Last fault of reading the manifest."""
    base_fault: str | None = None
    """Why no version can be served here."""
    refused: dict[int, str] = field(default_factory=dict)
    """Versions that will never be served here."""
    probe_failed: set[int] = field(default_factory=set)
    """Those of them whose probe failed."""
    reused: set[int] = field(default_factory=set)
    """Versions of the manifest whose names have stood for other bytes."""
    retries: dict[int, Retry] = field(default_factory=dict)
    _told: set[tuple[int | None, str]] = field(default_factory=set)

    def read(self) -> Manifest | Exception | None:
        """Poll the manifest; blocks on the store, and touches nothing but the reader."""
        try:
            return self.reader.poll()
        except BucketError as error:
            return error
        except Exception as error:  # this run's fault: the others are looked at all the same
            logger.exception("reading run %s failed in an unforeseen way", self.run_id)
            return error

    def absorb(self, outcome: Manifest | Exception | None, now: float) -> bool:
        """Take over what ``read`` found. Returns whether anything about the run changed."""
        before = (self.manifest, self.fault, self.missing_since)
        self.fault = None
        if isinstance(outcome, NotPublished):
            if self.manifest is not None:
                self.fault = str(outcome)
                self.missing_since = now if self.missing_since is None else self.missing_since
        elif isinstance(outcome, Exception):
            self.fault = f"{type(outcome).__name__}: {outcome}"
            if not self.gone(now):  # absent all the time, or it says nothing of a deletion
                self.missing_since = None
        else:
            self.missing_since = None
            if outcome is not None:
                self._take(outcome, now)
        return before != (self.manifest, self.fault, self.missing_since)

    def _take(self, manifest: Manifest, now: float) -> None:
        if self.manifest is not None and manifest.latest > self.manifest.latest > 0:
            self.gap_s = now - self.changed_at
        self.manifest = manifest
        self.changed_at = now
        self.base_fault = run_fault(manifest, self.served)
        numbers = {entry.version for entry in manifest.versions}
        self.refused = {v: why for v, why in self.refused.items() if v in numbers}
        self.probe_failed &= numbers
        self.retries = {v: retry for v, retry in self.retries.items() if v in numbers}
        self.reused = self.names.learn(manifest)
        self.probe_failed -= self.reused  # or they would be tried again with those
        for entry in manifest.window_versions():
            version = entry.version
            if version in self.reused:
                self.refused[version] = reused_fault(self.run_id, version)
            elif version not in self.refused and (why := version_fault(entry, self.served)):
                self.refused[version] = why

    def disowned(self, ready: Iterable[int]) -> list[int]:
        """Those of the ready versions that are not what the run means by their names."""
        latest = self.manifest.latest if self.manifest else 0
        return [version for version in ready if version in self.reused or version > latest]

    def untold(self) -> list[tuple[int | None, str]]:
        """What is wrong with the run (``None``) or a version, if it was not given before."""
        found: set[tuple[int | None, str]] = {
            (None, f"run {self.run_id}: {fault}")
            for fault in (self.fault, self.base_fault)
            if fault
        }
        for version, reason in self.refused.items():
            found.add((version, f"{adapter_name(self.run_id, version)} is refused: {reason}"))
        new, self._told = found - self._told, found
        return sorted(new, key=lambda one: one[1])

    def tell(self) -> None:
        """Log and count what is wrong and was not told before."""
        for version, text in self.untold():
            metrics.VERSIONS.labels(metrics.REFUSED).inc(version is not None)
            logger.warning(text, extra=about(self.run_id, version))

    def schedule(self, now: float, poll_s: float) -> None:
        """Set when to look next."""
        self.due_at = now + self._interval(now, poll_s) * (1 + JITTER * (2 * self.random() - 1))

    def next_at(self, now: float) -> float:
        """When something is to be done for it."""
        # A retry that is due already was passed over: its run has no slots.
        retries = [retry.due_at for retry in self.retries.values() if retry.due_at > now]
        return min([self.due_at, *retries])

    def _interval(self, now: float, poll_s: float) -> float:
        if self.waiting:
            return min(poll_s, EAGER_POLL_S)
        if self.manifest is not None and not self.running:
            return max(poll_s, ENDED_POLL_S)
        quiet_s = now - max(self.changed_at, self.first_seen_at)
        interval = poll_s
        if quiet_s > QUIET_AFTER_S:
            interval = max(poll_s, min(QUIET_POLL_S, poll_s * quiet_s / QUIET_AFTER_S))
        early_s = self.gap_s * (1 - EXPECTED_MARGIN) - quiet_s
        if early_s > 0:  # do not sleep over the time at which it is due
            return min(interval, max(early_s, EXPECTED_POLL_S))
        if quiet_s < self.gap_s * (1 + 2 * EXPECTED_MARGIN):
            return min(interval, EXPECTED_POLL_S)
        return interval

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """A client waits for a version while the block runs: look now, and often."""
        self.waiting += 1
        self.due_at = 0.0
        try:
            yield
        finally:
            self.waiting -= 1

    @property
    def running(self) -> bool:
        return self.manifest is not None and self.manifest.state is RunState.RUNNING

    def gone(self, now: float) -> bool:
        """Whether the run was deleted from the bucket: absent for long, by every answer."""
        return self.missing_since is not None and now - self.missing_since > GONE_AFTER_S

    def demand(self, now: float) -> Demand | None:
        """What the run asks for, or ``None`` if nothing of it can be served."""
        if self.manifest is None or self.base_fault or self.gone(now):
            return None
        if self.manifest.state is RunState.DELETED:
            return None
        return Demand(
            run_id=self.run_id,
            running=self.running,
            window=self.manifest.window,
            idle=now - self.changed_at > max(IDLE_AFTER_S, 4 * _longest_gap_s(self.manifest)),
            newest_at=max((entry.created_at for entry in self.manifest.versions), default=0.0),
        )

    def entries(self) -> dict[int, VersionEntry]:
        """Entries of the window, by version."""
        if self.manifest is None:
            return {}
        return {entry.version: entry for entry in self.manifest.window_versions()}

    def unusable(self, now: float) -> set[int]:
        """Versions not to be loaded now."""
        return {*self.refused, *(v for v, retry in self.retries.items() if retry.due_at > now)}

    def failed(self, version: int, reason: str, now: float) -> bool:
        """Note a failed attempt that is worth repeating. Returns whether the reason is new."""
        known = self.retries.get(version)
        attempts = known.attempts + 1 if known else 1
        wait_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** (attempts - 1))
        self.retries[version] = Retry(reason, now + wait_s, attempts)
        return known is None or known.reason != reason

    def doubt(self) -> None:
        """Forget failed probes: the engine is not in the state that it was in."""
        for version in self.probe_failed:
            self.refused.pop(version, None)
        self.probe_failed.clear()

    def faults(self) -> dict[int, str]:
        """Versions that are not expected to become ready, with the reason."""
        reasons = {version: self.retries[version].reason for version in self.faulty()}
        return {**reasons, **self.refused}

    def faulty(self) -> list[int]:
        """Those of ``faults`` that are still tried, ascending."""
        tried = (v for v, retry in self.retries.items() if retry.attempts >= FAULTY_AFTER)
        return sorted(version for version in tried if version not in self.refused)


def next_to_load(
    runs: Iterable[Run],
    ready: Callable[[str], list[int]],
    keep: Callable[[str], int],
    now: float,
) -> tuple[Run, VersionEntry] | None:
    """The next version to load: each run's newest before any run's second newest."""
    best: tuple[int, Run, VersionEntry] | None = None
    for run in runs:
        loaded, entries = ready(run.run_id), run.entries()
        for version in to_load(entries, loaded, keep(run.run_id), run.unusable(now))[:1]:
            newer = sum(other > version for other in loaded)
            if best is None or newer < best[0]:
                best = (newer, run, entries[version])
    return None if best is None else best[1:]


def _longest_gap_s(manifest: Manifest) -> float:
    """Longest time between two of the last versions, by the writer's own clock."""
    times = [entry.created_at for entry in manifest.window_versions()]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

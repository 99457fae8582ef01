"""Reads the heartbeats of a bucket in a thread of its own. Blocking; knows nothing of the fleet.

The thread is a daemon: an absent bucket must not hold up the proxy's end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adapter_bucket.errors import BucketError, ConfigError
from adapter_bucket.fetch import discover_runs
from adapter_bucket.heartbeat import HeartbeatReader, Seen
from adapter_bucket.store import Store
from bucket_lora_proxy.membership.rule import AllowRule, origin_of
from bucket_lora_proxy.upstream import Origin

log = logging.getLogger("bucket_lora_proxy")

QUIET_AFTER_S = 600.0
QUIET_POLL_S = 60.0
"""A run that showed no heartbeat for so long is looked at this seldom: a bucket keeps old runs."""

MAX_REFUSED = 64
"""Refused heartbeats that are shown; whoever fills the bucket must not fill the memory."""


@dataclass(frozen=True)
class Found:
    """A replica that the bucket names and a rule allows."""

    origin: Origin
    rule: AllowRule
    alive: bool
    """A heartbeat of it is still being renewed."""
    runs: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """What one look at the bucket came to."""

    replicas: dict[str, Found] = field(default_factory=dict)
    """By URL, in one spelling."""
    refused: dict[str, str] = field(default_factory=dict)
    """By "run/replica", or the replica alone: why it is not used."""
    fault: str | None = None
    """Why the bucket could not be read; what it holds is then not known."""


def view_of(seen: dict[str | None, dict[str, Seen]], rules: Sequence[AllowRule]) -> View:
    """Sort out the heartbeats of several runs, by run (``None``: of no run) and replica id. Pure.

    A replica that serves several runs has a heartbeat in each of them and is one replica.
    """
    replicas: dict[str, Found] = {}
    refused: dict[str, str] = {}
    for run_id, by_id in seen.items():
        subject = "" if run_id is None else f"{run_id}/"
        for replica_id, one in sorted(by_id.items()):
            try:
                origin, rule = origin_of(one.heartbeat.url, rules)
            except ConfigError as error:
                if len(refused) < MAX_REFUSED:
                    refused[f"{subject}{replica_id}"] = f"{_shown(one.heartbeat.url)!r}: {error}"
                continue
            known = replicas.get(origin.url)
            alive = one.alive or (known is not None and known.alive)
            runs = known.runs if known else ()
            if run_id is not None and run_id not in runs:
                runs += (run_id,)
            replicas[origin.url] = Found(origin, rule, alive, runs)
    return View(replicas, refused)


def _shown(url: str) -> str:
    """An address without a login: it goes into logs and onto the status page."""
    return f"…{url[url.rindex('@') :]}"[:200] if "@" in url else url[:200]


class HeartbeatFollower:
    """Looks at a bucket again and again.

    Args:
        open_store: opens the bucket; tried again until it works.
        runs: runs to follow; empty: all replicas, also those without a run.
        rules: which addresses may be used.
        poll_s: pause between two looks.
        deliver: called with every view, in the thread.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        runs: Sequence[str],
        rules: Sequence[AllowRule],
        poll_s: float,
        deliver: Callable[[View], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._runs = tuple(runs)
        self._rules = tuple(rules)
        self._poll_s = poll_s
        self._deliver = deliver
        self._clock = clock
        self._store: Store | None = None
        self._readers: dict[str | None, HeartbeatReader] = {}
        self._last_sign: dict[str | None, float] = {}
        """When a run last showed a heartbeat, or was first seen."""
        self._next_look: dict[str | None, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the look under way; does not wait for it."""
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._deliver(self.look())
            self._stop.wait(self._poll_s)

    def look(self) -> View:
        """One look at the bucket."""
        try:
            if self._store is None:
                self._store = self._open_store()
            return view_of(self._read(self._store), self._rules)
        except BucketError as error:
            return View(fault=f"{type(error).__name__}: {error}")
        except Exception as error:  # the thread must outlive a fault of this program
            log.exception("reading heartbeats failed")
            return View(fault=f"{type(error).__name__}: {error}")

    def _read(self, store: Store) -> dict[str | None, dict[str, Seen]]:
        now = self._clock()
        runs: tuple[str | None, ...] = self._runs or (None, *discover_runs(store))
        self._readers = {
            run_id: self._readers.get(run_id) or HeartbeatReader(store, run_id, clock=self._clock)
            for run_id in runs
        }
        for known in (self._last_sign, self._next_look):
            for run_id in known.keys() - self._readers.keys():
                del known[run_id]
        seen: dict[str | None, dict[str, Seen]] = {}
        for run_id, reader in self._readers.items():
            if now < self._next_look.get(run_id, now):
                continue
            seen[run_id] = reader.poll()
            last = self._last_sign.setdefault(run_id, now)
            if seen[run_id]:
                self._last_sign[run_id] = now
            elif run_id is not None and now - last > QUIET_AFTER_S:
                self._next_look[run_id] = now + QUIET_POLL_S
        return seen

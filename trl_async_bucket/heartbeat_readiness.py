"""Readiness from the heartbeats in the bucket, where no status can be asked over HTTP.

Slower than the status long-poll: a replica that writes its heartbeat once a version is ready is
seen at the next poll. Owns the polling; what a status says of an adapter is the contract's.

A replica that can never serve the run is a mistake to be mended before the first version is ready.
One that joins later must not end a run of days that it has nothing to do with: it is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.ready_views import on_fleet, on_replica
from adapter_bucket.status import ReadyState, ReplicaStatus
from adapter_bucket.store import Store
from trl_async_bucket.readiness import refusal

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between two reads: each costs one listing and a conditional GET per replica."""


class HeartbeatReadiness:
    """Reads one run's heartbeats. Not thread-safe: one call at a time.

    Args:
        store: The run's store.
        run_id: The run.
        check: Told the status of a living replica, by URL, at each poll; raises ``ConfigError``
            if it can never serve the run.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        check: Callable[[Mapping[str, ReplicaStatus]], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._reader = HeartbeatReader(store, run_id, clock=clock)
        self._run_id = run_id
        self._check = check
        self._left_out: dict[str, str] = {}
        """Living replicas that can never serve the run, and why."""
        self._named: set[str] = set()
        """What was warned of: a heartbeat may pause and come back."""
        self._began = False
        """Whether a version was ready."""
        self._clock = clock
        self._sleep = sleep

    def wait_ready(
        self,
        adapter: str,
        *,
        policy: ReadyPolicy,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """See ``readiness.Readiness``.

        Raises:
            ConfigError: a living replica can never serve the run, and none was ready yet.
        """
        deadline = self._clock() + timeout_s
        last = "no heartbeat of this run yet"
        while not should_stop():
            try:
                replicas = self._living()
            except StoreUnavailable as error:
                last = str(error)
            else:
                views = {url: on_replica(status, adapter) for url, status in replicas.items()}
                state = on_fleet(views, adapter, policy=policy)
                if state.state is ReadyState.READY:
                    self._began = True
                    return True
                if state.state is ReadyState.REFUSED:
                    refused = f"{adapter} is refused: {state.reason}"
                    raise refusal(state, refused)
                last = f"{state.state} on {state.ready_on} of {state.replicas}: {state.reason}"
                if self._left_out:
                    last += f"; left out: {'; '.join(self._left_out.values())}"
            if self._clock() + POLL_S > deadline:
                raise StoreUnavailable(
                    f"{adapter} is not ready by the heartbeats of run {self._run_id} "
                    f"(bucket_ready={policy}) after {timeout_s:.0f} s; last seen: {last}. Check "
                    "the replicas' logs and that they watch the same bucket; weight_sync_timeout "
                    "is the limit"
                )
            self._sleep(POLL_S)
        return False

    def _living(self) -> dict[str, ReplicaStatus]:
        living = {
            f"{seen.heartbeat.url} ({replica_id})": seen.heartbeat.status
            for replica_id, seen in self._reader.poll().items()
            if seen.alive
        }
        unfit = self._unfit(living)
        for why in set(unfit.values()) - self._named:
            logger.warning("left out of the run until it is started anew: %s", why)
        self._named.update(unfit.values())
        self._left_out = unfit
        return {url: status for url, status in living.items() if url not in unfit}

    def _unfit(self, living: Mapping[str, ReplicaStatus]) -> dict[str, str]:
        """Why some of them can never serve the run; raises the first reason before it began."""
        unfit = {}
        for url, status in living.items():
            try:
                self._check({url: status})  # each time: it may be another process at that address
            except ConfigError as error:
                if not self._began:
                    raise
                unfit[url] = str(error)
        return unfit

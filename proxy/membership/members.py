"""Lets replicas join and leave the fleet while the proxy runs.

The list given by the operator stays as it is. A replica that a bucket names joins when its
heartbeat is alive, and leaves once its heartbeat is gone or stale *and* it has not answered for a
while: the end of a run takes heartbeats back from servers that go on, and a bucket that cannot be
written to is no reason to lose a replica that works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from adapter_bucket.json_logs import about
from adapter_bucket.stores import open_store
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.membership.heartbeats import Found, HeartbeatFollower, View
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.prefix import BLOCK_TOKENS
from bucket_lora_proxy.replicas import Replica, Source
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.upstream import Origin
from bucket_lora_proxy.watcher import Watcher

log = logging.getLogger("bucket_lora_proxy")

MakeReplica = Callable[[Origin, int, Source, str | None], Replica]
"""From address, slot, source and token."""


class Membership:
    """Owns who is in the fleet.

    Args:
        config: names the static replicas, and the bucket if there is one.
        make: makes a replica; connects nothing.
    """

    def __init__(
        self,
        config: ProxyConfig,
        fleet: Fleet,
        router: Router,
        watcher: Watcher,
        metrics: Metrics,
        make: MakeReplica,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._router = router
        self._watcher = watcher
        self._metrics = metrics
        self._make = make
        self._view = View()
        self._left_out = 0
        """Live replicas for which the fleet has no room."""
        for origin in config.replicas:
            self._add(origin, Source.STATIC, config.token_of(origin))

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Follow the bucket, if one is configured, until the block is left."""
        config = self._config
        if config.bucket is None:
            yield
            return
        url = config.bucket
        loop = asyncio.get_running_loop()
        views: asyncio.Queue[View] = asyncio.Queue()

        def deliver(view: View) -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while the bucket was read
                loop.call_soon_threadsafe(views.put_nowait, view)

        follower = HeartbeatFollower(
            lambda: open_store(url),
            runs=config.bucket_runs,
            rules=config.allow_replicas,
            poll_s=config.bucket_poll_s,
            deliver=deliver,
        )
        self._fleet.note = f"bucket {url} has not been read yet"
        task = asyncio.create_task(self._take_in_all(views))
        follower.start()
        try:
            yield
        finally:
            follower.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _take_in_all(self, views: asyncio.Queue[View]) -> None:
        while True:
            view = await views.get()
            try:
                self.take_in(view)
            except Exception:  # a fault of this program must not end membership for good
                log.exception("taking in the heartbeats failed")

    def take_in(self, view: View) -> None:
        """Act on one look at the bucket."""
        if view.fault is not None:
            if view.fault != self._view.fault:
                log.warning("bucket %s cannot be read: %s", self._config.bucket, view.fault)
            self._view = View(self._view.replicas, self._view.refused, view.fault)
            self._say()
            return
        for subject, reason in view.refused.items():
            if self._view.refused.get(subject) != reason:
                log.warning("heartbeat %s is not used: %s", subject, reason)
        self._view = view
        known = {replica.url: replica for replica in self._fleet.replicas}
        self._dismiss(view)
        left_out = []
        for url, found in view.replicas.items():
            replica = known.get(url)
            if replica is not None:
                replica.runs = found.runs
            elif found.alive and len(self._fleet.replicas) < self._config.max_replicas:
                self._join(found)
            elif found.alive:
                left_out.append(url)
        self._tell_left_out(left_out)
        self._say()

    def _dismiss(self, view: View) -> None:
        now = asyncio.get_running_loop().time()
        for replica in list(self._fleet.replicas):
            found = view.replicas.get(replica.url)
            if replica.source is Source.STATIC or (found is not None and found.alive):
                continue
            if replica.down_for(now) > self._config.unresponsive_s:
                self._leave(replica, "its heartbeat is stale" if found else "its heartbeat is gone")

    def _join(self, found: Found) -> None:
        token = found.rule.token or self._config.token_of(found.origin)
        replica = self._add(found.origin, Source.BUCKET, token)
        replica.runs = found.runs
        self._watcher.watch(replica)
        self._metrics.membership.add("join")
        log.info(
            "replica %s is a member, by its heartbeat",
            replica.url,
            extra=about(replica=replica.url),
        )
        self._fleet.notify()

    def _tell_left_out(self, urls: list[str]) -> None:
        if urls and not self._left_out:
            log.error(
                "replica %s and %d more are left out: the fleet has the %d that --max-replicas "
                "allows",
                urls[0],
                len(urls) - 1,
                self._config.max_replicas,
            )
        self._left_out = len(urls)

    def _add(self, origin: Origin, source: Source, token: str | None) -> Replica:
        slot = self._router.take_slot()
        replica = self._make(origin, slot, source, token)
        replica.cached_tokens = lambda: self._router.index.blocks(slot) * BLOCK_TOKENS
        self._fleet.replicas.append(replica)
        return replica

    def _leave(self, replica: Replica, reason: str) -> None:
        self._fleet.replicas.remove(replica)
        self._watcher.forget(replica, reason)
        self._router.free_slot(replica.slot)
        self._metrics.membership.add("leave")
        self._metrics.forget(replica.url)
        log.info(
            "replica %s is no member any more: %s",
            replica.url,
            reason,
            extra=about(replica=replica.url),
        )
        self._fleet.notify()

    def _say(self) -> None:
        """Put into words why the bucket brought no (more) replicas."""
        view = self._view
        if view.fault is not None:
            note = f"bucket {self._config.bucket} cannot be read: {view.fault}"
        elif self._left_out:
            limit = self._config.max_replicas
            note = f"{self._left_out} replicas are left out: --max-replicas is {limit}"
        elif view.refused:
            subject, reason = next(iter(view.refused.items()))
            more = f" (and {len(view.refused) - 1} more)" if len(view.refused) > 1 else ""
            note = f"heartbeat {subject} is not used: {reason}{more}"
        elif not any(found.alive for found in view.replicas.values()):
            note = f"bucket {self._config.bucket} holds no live heartbeat of a replica"
        else:
            note = ""
        self._fleet.note = note

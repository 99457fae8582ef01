"""All replicas, and a way to wait for any change of them. No I/O here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from adapter_bucket.ready_policy import ANY, ReadyPolicy
from adapter_bucket.ready_views import on_fleet
from adapter_bucket.status import AdapterStatus
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.slow_start import hold_back


class Fleet:
    """All replicas, and a way to wait for any change of them."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self.replicas = list(replicas)
        self.note = ""
        """Why the bucket brought no (more) replicas, in words."""
        self._waiting: set[asyncio.Future[None]] = set()

    def up(self) -> list[Replica]:
        """Replicas in rotation."""
        return [replica for replica in self.replicas if replica.in_rotation]

    def has_just_lost_one(self, within_s: float) -> bool:
        """Whether a replica is down that was up so short a time ago, or was not asked yet."""
        now = time.monotonic()
        return any(not one.up and one.down_for(now) < within_s for one in self.replicas)

    def serving(self, model: str | None) -> list[Replica]:
        """Replicas to which a generation for this model may be sent now.

        Those whose generations keep failing are left out, unless there is no other; so are those
        that have just joined and have as much to do as they should.
        """
        found = [replica for replica in self.replicas if replica.serves(model)]
        if len(found) < 2:
            return found
        now = time.monotonic()  # the loop's clock; to ask which loop runs is a system call
        return hold_back([one for one in found if one.breaker.allows(now)] or found, now)

    def adapter(self, name: str, policy: ReadyPolicy = ANY) -> AdapterStatus:
        """State of an adapter on the replicas that are up."""
        now = asyncio.get_running_loop().time()
        views = {replica.url: replica.view(name, now) for replica in self.up()}
        return on_fleet(views, name, policy=policy)

    def notify(self) -> None:
        """Wake everything that waits for a change."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next change, or until the time is over."""
        await self.changed_until(lambda: False, timeout_s, once=True)

    async def changed_until(
        self, settled: Callable[[], bool], timeout_s: float, *, once: bool = False
    ) -> bool:
        """Wait until ``settled()`` holds, looking again after every change.

        Args:
            settled: must not await; may raise, which ends the wait.
            timeout_s: longest wait.
            once: return after the first change even if it does not hold.

        Returns:
            Whether it held.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not settled():
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.add(future)
            try:
                async with asyncio.timeout_at(deadline):
                    await future
            except TimeoutError:
                return settled()
            finally:
                self._waiting.discard(future)
            if once:
                break
        return settled()

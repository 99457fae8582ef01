"""Who is to blame when no rollout arrives: a trainer that waits for ever says nothing by itself.

Owns the judgement, from what it is told at every look into the empty queue. Generation may take as
long as it likes; what ends the training is that nothing is left which could generate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

from adapter_bucket.errors import StoreUnavailable

logger = logging.getLogger(__name__)

TELL_EVERY_S = 60.0


class StarvationWatchdog:
    """Watches a trainer that waits for rollouts. Used on the trainer's thread only.

    Args:
        replicas_fault: Why no replica can be asked; ``None`` while one answers.
        limit_s: How long none may answer.
    """

    def __init__(
        self,
        replicas_fault: Callable[[], str | None],
        *,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas_fault = replicas_fault
        self._limit_s = limit_s
        self._clock = clock
        self._progress: Hashable = object()
        self._since = 0.0
        self._told_at = 0.0
        self._answered_at = 0.0

    def waiting(self, progress: Hashable) -> None:
        """Say that the queue was found empty.

        Args:
            progress: Anything that changes whenever a rollout has arrived.

        Raises:
            StoreUnavailable: no replica has answered for ``limit_s`` of an unbroken wait.
        """
        now = self._clock()
        if progress != self._progress:
            self._progress = progress
            self._since = self._told_at = self._answered_at = now
            return
        if now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        fault = self._replicas_fault()
        if fault is None:
            self._answered_at = self._clock()
            logger.warning(
                "no rollout for %.0f s: replicas answer, so generation itself is slow, or the "
                "rollout worker is stuck; see its log",
                now - self._since,
            )
            return
        logger.warning("no rollout for %.0f s: %s", now - self._since, fault)
        if self._clock() - self._answered_at > self._limit_s:
            raise StoreUnavailable(
                f"no rollout for {now - self._since:.0f} s, and no replica has answered for "
                f"{self._clock() - self._answered_at:.0f} s: {fault}. Start one, or raise "
                "weight_sync_timeout, which is the limit"
            )

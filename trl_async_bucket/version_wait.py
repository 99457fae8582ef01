"""Waiting for versions to be ready, where one that was damaged on its way is passed over.

Owns what a refusal means for the run. A version that no replica can verify is never served, so no
harm is done by going on with rollouts of the one before; but a bucket that damages every version
would stop all learning, so the second in a row is an error. See decision 0091.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum, auto
from functools import partial

from adapter_bucket.json_logs import about
from trl_async_bucket.readiness import RefusedForNow, ReplicasRefused

logger = logging.getLogger(__name__)

WaitReady = Callable[[int, float, Callable[[], bool]], bool]
"""``(version, timeout_s, should_stop)``: see ``readiness.Readiness``."""


class Waited(Enum):
    """How the wait for a version ended."""

    READY = auto()
    STOPPED = auto()
    """The caller asked for it."""
    PASSED_OVER = auto()
    """No replica will serve it; another version has to follow."""


STOP_CHECK_S = 0.05
"""Longest time for which a stop request goes unseen."""


class VersionWait:
    """Waits for one version after the other. Not thread-safe: used on the publisher's thread.

    Args:
        wait_ready: Called on a thread of its own, one call at a time, and none after one that was
            left because of a stop request.
    """

    def __init__(self, wait_ready: WaitReady) -> None:
        self._wait_ready = wait_ready
        self._last_refusal: str | None = None

    def __call__(self, version: int, timeout_s: float, should_stop: Callable[[], bool]) -> Waited:
        """Wait for a version.

        Raises:
            ReplicasRefused: for good, or this version and the one before could not be verified.
            StoreUnavailable: not ready within ``timeout_s``.
        """
        try:
            if not self._ask(version, timeout_s, should_stop):
                return Waited.STOPPED
        except RefusedForNow as error:
            if self._last_refusal is not None:
                raise ReplicasRefused(
                    f"two versions in a row could not be fetched or verified: {error}; and before "
                    f"it: {self._last_refusal}. Look with `bucket-lora verify`; if their objects "
                    "are damaged, somebody else writes there, or the storage is faulty"
                ) from error
            self._last_refusal = str(error)
            logger.warning(
                "version %d is passed over: %s. Rollouts go on with the version before; should "
                "the next one be refused as well, training stops",
                version,
                error,
                extra=about(version=version),
            )
            return Waited.PASSED_OVER
        self._last_refusal = None
        return Waited.READY

    def _ask(self, version: int, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        """Leaves the call alone once it is to stop: a status call to a machine that is gone lasts
        for its whole timeout, longer than what a preempted trainer has for its last version."""
        if should_stop():
            return False
        answer: Future[bool] = Future()
        call = partial(self._wait_ready, version, timeout_s, should_stop)
        threading.Thread(
            target=_settle, args=(answer, call), name="bucket-readiness", daemon=True
        ).start()
        while not wait([answer], timeout=STOP_CHECK_S).done:
            if should_stop():
                return False
        return answer.result()


def _settle(answer: Future[bool], call: Callable[[], bool]) -> None:
    try:
        result = call()
    except BaseException as error:  # the thread's boundary: raised again by who waits
        answer.set_exception(error)
    else:
        answer.set_result(result)

"""When a trainer's write to the bucket is tried again, and when not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from adapter_bucket.errors import StoreDenied, StoreUnavailable
from adapter_bucket.json_logs import about

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 15.0
"""Pause between two attempts: doubled from the first to the longest."""


def publish_with_retries(
    publish: Callable[[], None],
    *,
    version: int,
    give_up_before: Callable[[float], bool],
    pause: Callable[[float], None],
) -> None:
    """Publish, again while the store is away.

    Args:
        publish: Commits the version. Called again after ``StoreUnavailable``.
        version: For the log.
        give_up_before: Whether to raise instead of a pause of so many seconds.
        pause: Pauses for so many seconds, or less if the publisher is aborted.

    Raises:
        StoreDenied: at once.
        StoreUnavailable: it gave up.
    """
    what = f"publishing version {version}"
    _retry(publish, what, give_up_before, pause, extra=about(version=version))


def finish_with_retries(
    finish: Callable[[], None], *, limit_s: float, done: str, command: str
) -> None:
    """Mark a run finished, again while the store is away.

    Args:
        finish: Marks it. Called again after ``StoreUnavailable``.
        limit_s: Longest time until the last attempt begins.
        done: What is in the bucket already, for the error.
        command: Does it by hand, for the error.

    Raises:
        StoreDenied: at once.
        StoreUnavailable: the store stayed away; names what is left to do.
    """
    deadline = time.monotonic() + limit_s

    def give_up_before(pause_s: float) -> bool:
        return time.monotonic() + pause_s > deadline

    try:
        _retry(finish, "marking the run finished", give_up_before, time.sleep)
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"the run could not be marked finished: {error}. {done}: nothing has to be trained "
            f"again. Run `{command}` once the bucket answers"
        ) from error


def _retry(
    call: Callable[[], None],
    what: str,
    give_up_before: Callable[[float], bool],
    pause: Callable[[float], None],
    extra: Mapping[str, Any] | None = None,
) -> None:
    pause_s = RETRY_FIRST_S
    while True:
        try:
            return call()
        except StoreDenied:
            raise  # credentials do not mend themselves within a run's patience
        except StoreUnavailable as error:
            if give_up_before(pause_s):
                raise
            logger.warning("%s again in %.1f s: %s", what, pause_s, error, extra=extra)
        pause(pause_s)
        pause_s = min(pause_s * 2, RETRY_MAX_S)

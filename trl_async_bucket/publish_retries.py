"""When publishing a version is tried again, and when not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from adapter_bucket.errors import StoreDenied, StoreUnavailable
from adapter_bucket.json_logs import about

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 15.0
"""Pause between attempts to publish one version: doubled from the first to the longest."""


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
    pause_s = RETRY_FIRST_S
    while True:
        try:
            return publish()
        except StoreDenied:
            raise  # credentials do not mend themselves within a run's patience
        except StoreUnavailable as error:
            if give_up_before(pause_s):
                raise
            logger.warning(
                "publishing version %d again in %.1f s: %s",
                version,
                pause_s,
                error,
                extra=about(version=version),
            )
        pause(pause_s)
        pause_s = min(pause_s * 2, RETRY_MAX_S)

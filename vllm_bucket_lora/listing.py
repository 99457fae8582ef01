"""When the runs of a bucket are listed next. Does no listing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from vllm_bucket_lora.run import JITTER

DISCOVER_S = 5.0
"""Seconds between two listings of the runs."""
EAGER_DISCOVER_S = 0.5
"""The same while a client waits for a version of an unknown run."""


class ListingPace:
    """The pace of one watcher's listings. Times are seconds of its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listed_at = self.next_at = clock()
        self._strangers = 0

    def begin(self) -> bool:
        """Whether a listing is due. If so it counts as made, however it ends."""
        due = self._clock() >= self.next_at
        if due:
            self.end()  # should nobody come to tell
        return due

    def end(self) -> None:
        """A listing has just ended: plan the next one."""
        interval = EAGER_DISCOVER_S if self._strangers else DISCOVER_S
        self._listed_at = self._clock()
        self.next_at = self._listed_at + interval * (1 + JITTER * random.random())

    def hasten(self) -> None:
        """List soon, if a client waits for a version of an unknown run."""
        if self._strangers:
            self.next_at = min(self.next_at, self._listed_at + EAGER_DISCOVER_S)

    @contextlib.contextmanager
    def stranger(self) -> Iterator[None]:
        """A client waits for a version of an unknown run while the block runs."""
        self._strangers += 1
        self.hasten()
        try:
            yield
        finally:
            self._strangers -= 1

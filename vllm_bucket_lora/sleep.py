"""Whether the engine sleeps, as the API server processes were told: each call reaches one of them.

A sleep may be told to one process and its end to another, so neither alone knows. What counts is
which of the two was told last, to anybody: the processes of one machine share a monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

from vllm_bucket_lora.ports import Group


class Turn(Enum):
    """What happened since the last look."""

    NOTHING = auto()
    FELL_ASLEEP = auto()
    WOKE = auto()
    """It slept, perhaps only between two looks, and is awake."""


class SleepState:
    """Sleep and wake of one server, as this process sees it."""

    def __init__(self, group: Group, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._heeded_sleep = False
        self._heeded_wake_at = 0.0
        self.slept_at = self.woke_at = 0.0
        """When this process itself was last told, seconds of the clock; 0: never."""

    def told_to_sleep(self) -> None:
        """This process was told that the engine goes to sleep, and heeds it at once."""
        self.slept_at = self._clock()
        self._heeded_sleep = True

    def told_to_wake(self) -> None:
        """This process was told that the engine is awake."""
        self.woke_at = self._clock()

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps."""
        slept_at, woke_at = self._last()
        return slept_at > woke_at

    def look(self) -> Turn:
        """What changed since the last look, whoever was told."""
        slept_at, woke_at = self._last()
        if slept_at > woke_at:
            turn = Turn.NOTHING if self._heeded_sleep else Turn.FELL_ASLEEP
            self._heeded_sleep = True
            return turn
        self._heeded_sleep = False
        if woke_at <= self._heeded_wake_at:
            return Turn.NOTHING
        self._heeded_wake_at = woke_at
        return Turn.WOKE

    def _last(self) -> tuple[float, float]:
        slept_at, woke_at = self._group.slept_and_woke_at()
        return max(self.slept_at, slept_at), max(self.woke_at, woke_at)

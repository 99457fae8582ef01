"""Circuit breaker of one replica: its status may be good while its generations fail. Pure.

Closed, every request may pass. After ``FAILURES`` failures in a row it opens, for a time that
doubles with each failed trial; then one request at a time is let through, and the first success
closes it.
"""

from __future__ import annotations

FAILURES = 5
"""In a row: a single reset or a bad request is not a pattern."""

OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""How long it stays open, at first and at most."""


class Breaker:
    """State of one replica's breaker. ``now`` is any monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0
        self._open_s = OPEN_S
        self._trials = 0
        self._trying = 0
        """Number of the trial that is under way; 0: none."""

    @property
    def closed(self) -> bool:
        """Whether it lets everything through."""
        return self._failures < FAILURES

    def allows(self, now: float) -> bool:
        """Whether a request may pass now: always if closed, one at a time after the pause."""
        return self.closed or (now >= self._open_until and not self._trying)

    def begin(self) -> int:
        """A request passes. Returns the number of its trial, from 1, or 0 if it is none.

        Others may pass beside a trial, where there is no other replica, or from before it opened:
        neither says whether the trial is over.
        """
        if self._failures < FAILURES or self._trying:
            return 0
        self._trials += 1
        self._trying = self._trials
        return self._trying

    def succeed(self) -> None:
        """A request was answered well."""
        self._failures = 0
        self._open_s = OPEN_S
        self._trying = 0  # it is closed; whatever was a trial is a request like any other

    def fail(self, now: float, trial: int = 0) -> None:
        """A request failed. Those that were under way when it opened do not keep it open longer.

        Args:
            now: when.
            trial: what ``begin`` returned for this request.
        """
        self._failures += 1
        if self._failures == FAILURES:
            self._open_until = now + self._open_s
        elif trial and trial == self._trying and now >= self._open_until:
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)
            self._open_until = now + self._open_s

    def end(self, trial: int) -> None:
        """A trial is over, one way or another: there is room for the next."""
        if trial == self._trying:
            self._trying = 0

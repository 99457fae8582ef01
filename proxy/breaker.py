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
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether it lets everything through."""
        return self._failures < FAILURES

    def allows(self, now: float) -> bool:
        """Whether a request may pass now: always if closed, one at a time after the pause."""
        return self.closed or (now >= self._open_until and not self._trying)

    def begin(self) -> None:
        """A request passes."""
        if not self.closed:
            self._trying = True

    def succeed(self) -> None:
        """A request was answered well."""
        self._failures = 0
        self._open_s = OPEN_S
        self._trying = False

    def fail(self, now: float) -> None:
        """A request failed. Those that were under way when it opened do not keep it open longer."""
        self._failures += 1
        if self._failures == FAILURES:
            self._open_until = now + self._open_s
        elif self._trying and now >= self._open_until:
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)
            self._open_until = now + self._open_s
        self._trying = False

    def forget(self) -> None:
        """A request ended without saying anything about the replica."""
        self._trying = False

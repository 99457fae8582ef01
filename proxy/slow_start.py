"""A replica that has just (re)joined gets its share of the load step by step. Pure.

It has no prefix cached, may still compile, and stands there with nothing to do: by cost alone, it
would be sent everything that comes in until it has as much to do as the others.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar


class Starting(Protocol):
    """A replica as seen here."""

    in_flight: int
    warm_at: float
    """When its slow start is over."""

    def warmth(self, now: float) -> float:
        """How far its slow start is, from 0 to 1."""
        ...


R = TypeVar("R", bound=Starting)


def hold_back(candidates: list[R], now: float) -> list[R]:
    """Leave out those that have reached what they may have in flight for now.

    That is a share, growing with time, of the mean of those that are warm; at least one request.
    Where none is warm nobody is held back: a fleet that starts as a whole has no others.
    """
    warm = [one for one in candidates if one.warm_at <= now]
    if not warm or len(warm) == len(candidates):
        return candidates
    mean = sum(one.in_flight for one in warm) / len(warm)

    def may_have(one: R) -> int:
        return max(1, math.ceil(one.warmth(now) * mean))

    return [one for one in candidates if one.warm_at <= now or one.in_flight < may_have(one)]

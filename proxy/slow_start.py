"""A replica that has just (re)joined gets its share of the load step by step. Pure.

It has no prefix cached, may still compile, and stands there with nothing to do: by cost alone, it
would be sent everything that comes in until it has as much to do as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Starting(Protocol):
    """A replica as seen here."""

    in_flight: int

    def warmth(self, now: float) -> float:
        """How far its slow start is, from 0 to 1."""
        ...


R = TypeVar("R", bound=Starting)


def hold_back(candidates: Sequence[R], now: float) -> list[R]:
    """Leave out those that have reached what they may have in flight for now.

    That is a share, growing with time, of the mean of those that are warm; at least one request.
    Where none is warm nobody is held back: a fleet that starts as a whole has no others.
    """
    warmth = [candidate.warmth(now) for candidate in candidates]
    warm = [one for one, share in zip(candidates, warmth, strict=True) if share >= 1]
    if not warm or len(warm) == len(candidates):
        return list(candidates)
    mean = sum(one.in_flight for one in warm) / len(warm)
    return [
        one
        for one, share in zip(candidates, warmth, strict=True)
        if share >= 1 or one.in_flight < max(1, math.ceil(share * mean))
    ]

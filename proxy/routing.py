"""Which replica gets a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a choice depends on."""

    in_flight: int


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], *, tried: Collection[C], turn: int) -> C | None:
    """Pick the candidate with the fewest requests in flight.

    Args:
        candidates: replicas that may be asked, in a stable order.
        tried: replicas that already failed this request; picked only if there is no other.
        turn: a running number that breaks ties, so that an idle fleet is filled evenly.

    Returns:
        The replica, or ``None`` if there is no candidate.
    """
    fresh = [candidate for candidate in candidates if candidate not in tried] or list(candidates)
    if not fresh:
        return None
    start = turn % len(fresh)
    return min(fresh[start:] + fresh[:start], key=lambda candidate: candidate.in_flight)

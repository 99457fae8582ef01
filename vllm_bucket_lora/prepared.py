"""What a worker has read, or is reading, ahead of the loads that will take it.

An engine knows adapters by number, and numbers come again: in versions 4096 apart, and by chance in
two runs. So nothing is handed out by number alone, and nothing outlives the adapter it is of.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_MOST = 4
"""Adapters kept between reading and loading; more are leftovers of loads that never came."""


@dataclass(frozen=True)
class Prepared:
    """One adapter that is read ahead."""

    name: str
    path: str
    adapter: Future[Any]
    """vLLM's ``LoRAModel``."""


class PreparedAdapters:
    """The adapters that one worker reads ahead, by number. Used by the engine loop only."""

    def __init__(self) -> None:
        self._prepared: dict[int, Prepared] = {}

    def __contains__(self, number: object) -> bool:
        return number in self._prepared

    def find(self, number: int) -> Future[Any] | None:
        """What is being read under a number, if anything."""
        found = self._prepared.get(number)
        return None if found is None else found.adapter

    def expects(self, number: int, name: str, path: str) -> bool:
        """Whether this very adapter is here. Another one of its number is a leftover, and goes."""
        found = self._prepared.get(number)
        if found is None:
            return False
        if (found.name, found.path) != (name, path):
            self.drop(number)
            return False
        return True

    def make_room(self) -> None:
        """Drop the oldest, if there are too many for one more."""
        while len(self._prepared) >= _MOST:
            self.drop(next(iter(self._prepared)))

    def put(self, number: int, prepared: Prepared) -> None:
        """Keep an adapter until its load takes it."""
        self._prepared[number] = prepared

    def take(self, number: int, name: str, path: str) -> Future[Any] | None:
        """Hand out this very adapter, and no other one of its number."""
        if not self.expects(number, name, path):
            return None
        return self._prepared.pop(number).adapter

    def give_up(self, number: int) -> str | None:
        """Forget what was read for a load that did not come; what is still being read stays.

        Else a fetch that takes longer than a load waits would begin anew with every retry.

        Returns:
            The adapter's name, if there was one.
        """
        found = self._prepared.get(number)
        if found is None:
            return None
        if found.adapter.done():
            self.drop(number)
        return found.name

    def drop(self, number: int) -> None:
        """Forget what was read under a number; nobody will load it."""
        dropped = self._prepared.pop(number, None)
        if dropped is not None:
            dropped.adapter.cancel()  # does nothing once it has begun

"""The ranks of a trainer, as far as they must agree on what rank 0 learned from the bucket."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")


class Ranks(Protocol):
    """A process group. All ranks must make the same calls in the same order."""

    rank: int
    local_rank: int
    """Rank within this host."""
    world_size: int

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        ...

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, on all ranks."""
        ...


class AccelerateRanks:
    """``Ranks`` over a trainer's ``accelerator``."""

    def __init__(self, accelerator: Any) -> None:
        self.rank: int = accelerator.process_index
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size: int = accelerator.num_processes

    def from_first(self, value: Any) -> Any:
        """See ``Ranks``."""
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value], from_process=0)[0]

    def from_all(self, value: Any) -> list[Any]:
        """See ``Ranks``."""
        from accelerate.utils import gather_object

        return list(gather_object([value]))


def on_first(ranks: Ranks, call: Callable[[], T]) -> T:
    """Run ``call`` on rank 0 only; its result, or its error, reaches all ranks.

    Raises:
        Exception: what ``call`` raised, on every rank, so that none is left in a collective.
    """
    outcome: Any = caught(call) if ranks.rank == 0 else None
    outcome = ranks.from_first(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return cast("T", outcome)


def caught(call: Callable[[], T]) -> T | Exception:
    """The result, or the error as a value."""
    try:
        return call()
    except Exception as error:
        return error

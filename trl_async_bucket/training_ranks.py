"""The ranks of a trainer, as far as they must agree on what rank 0 learned from the bucket."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from trl_async_bucket.ranks import from_rank_0, world_size

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


class JobRanks:
    """``Ranks`` over the process group of this job; one rank without ``torch.distributed``."""

    def __init__(self) -> None:
        self.world_size = world_size()
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def from_first(self, value: Any) -> Any:
        """See ``Ranks``."""
        return from_rank_0(value)

    def from_all(self, value: Any) -> list[Any]:
        """See ``Ranks``."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


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

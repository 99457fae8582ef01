"""Errors and values that all ranks of a job must agree on.

Owns the small collectives beside the weights. Rank 0 alone talks to the bucket; without these, an
error there leaves the other ranks waiting in their next collective until the process group gives
up. With one process, or before ``torch.distributed`` is initialised, everything here costs nothing.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adapter_bucket.errors import BucketError

T = TypeVar("T")


class RankFailed(BucketError):
    """Another rank of this job failed. The message names the rank and holds its error."""


class all_ranks:
    """A block that ends on all ranks in the same way: an error on one is an error on every one.

    Costs one all-reduce of 8 bytes when the block ends. The rank that failed raises its own error,
    the others ``RankFailed`` with that error's text. If several failed, the lowest rank is named.

    All ranks must enter. Collectives inside the block are allowed, but a rank that fails *before*
    a collective of the block leaves the others inside it: they end when the process group's timeout
    does (``ddp_timeout``, 30 minutes by default) or when the launcher ends them. So put
    what can fail (checks, allocations) into a block of its own, in front.

    ``KeyboardInterrupt`` and ``SystemExit`` are not shared: whoever interrupts a job interrupts all
    of its processes, and a rank that waits for the others could not be interrupted.

    Args:
        what: Names the block in the error.
        group: Ranks that enter; all of the job by default.

    Raises:
        RankFailed: another rank failed, or did not arrive.
    """

    def __init__(self, what: str, *, group: dist.ProcessGroup | None = None) -> None:
        self._what = what
        self._group = group

    def __enter__(self) -> None:
        """Nothing is exchanged here."""

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if world_size(self._group) == 1 or not (error is None or isinstance(error, Exception)):
            return
        try:
            failed = self._exchange(error)
        except RuntimeError as broken:
            if error is not None:
                return  # the own error goes on; it is likely what broke the group, too
            raise RankFailed(
                f"{self._what}: another rank ended, or did not come within the process group's "
                f"timeout ({broken}). Its own error is in its log"
            ) from broken
        if error is None and failed is not None:
            raise RankFailed(f"{self._what}: {failed}")

    def _exchange(self, error: BaseException | None) -> str | None:
        """Text of the lowest failed rank's error, on all ranks; ``None`` if none failed."""
        size = dist.get_world_size(self._group)
        rank = dist.get_rank(self._group)
        device = _small_device(self._group)
        status = torch.tensor([0 if error is None else size - rank], device=device)
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self._group)
        code = int(status.item())
        if code == 0:
            return None
        failed = size - code
        text = [f"rank {failed} failed: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(text, group=self._group, group_src=failed, device=device)
        return text[0]


def from_rank_0(value: T) -> T:
    """Rank 0's value on every rank; it must survive pickling. All ranks must call it."""
    if world_size() == 1:
        return value
    holder: list[Any] = [value]
    dist.broadcast_object_list(holder, src=0, device=_small_device(None))
    received: T = holder[0]
    return received


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 without ``torch.distributed``."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return int(dist.get_world_size(group))


def local_rank() -> int:
    """Number of this process among those of its host, as the launcher gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_rank_0() -> bool:
    """Whether this process is the one that talks to the bucket."""
    return world_size() == 1 or dist.get_rank() == 0


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Backend by device type, e.g. ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _small_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a few bytes travel: on the CPU if the group can, since reading them there waits for no
    GPU queue."""
    by_device = backends(group)
    if "cpu" in by_device:
        return torch.device("cpu")
    device_type = next(iter(by_device))
    return torch.device(device_type, torch.get_device_module(device_type).current_device())

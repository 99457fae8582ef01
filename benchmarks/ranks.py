"""Several processes of a benchmark as the ranks of one process group, this one as rank 0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Literal, TypeVar

JOIN_S = 60.0

T = TypeVar("T")


def as_rank_0(
    work: Callable[[], T], processes: int, *, backend: Literal["gloo", "nccl"] = "gloo"
) -> T:
    """Run ``work`` on every rank and return what it returned here.

    Args:
        work: Can be pickled: the other ranks are spawned.
        processes: How many ranks; with one there is no process group.
        backend: ``gloo`` over loopback, or ``nccl`` with a GPU for each rank.
    """
    import torch.multiprocessing as mp

    if processes == 1:
        return work()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        others = [
            context.Process(
                target=_join, args=(work, processes, backend, meeting, rank), daemon=True
            )
            for rank in range(1, processes)
        ]
        for other in others:
            other.start()
        found = _join(work, processes, backend, meeting, 0)
        for other in others:
            other.join(JOIN_S)
    return found


def _join(work: Callable[[], T], processes: int, backend: str, meeting: str, rank: int) -> T:
    import torch
    import torch.distributed as dist

    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}/store", rank=rank, world_size=processes
    )
    try:
        return work()
    finally:
        dist.destroy_process_group()

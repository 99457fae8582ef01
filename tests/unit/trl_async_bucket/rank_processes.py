"""Runs a function as several ranks of a real gloo process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT_S = 60


def as_ranks(size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Call ``function(*args)`` in ``size`` processes; the results by rank.

    The function must be importable. An exception in one is raised here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.distributed.tensor", "peft"])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(size, mp_context=context) as pool,
    ):
        meeting = Path(folder) / "store"
        futures = [pool.submit(_run, rank, size, meeting, function, args) for rank in range(size)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]


def _run(rank: int, size: int, meeting: Path, function: Callable[..., T], args: Any) -> T:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=20),
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()

"""How long do two ranks take to bring a sharded adapter into one file?

`make bench BENCH_ARGS=benchmarks/test_gather.py`. The adapter has the tensors of an all-linear LoRA
of rank 16 on Qwen2.5-1.5B (392 of them, fp32), cut over two gloo processes as FSDP2 cuts them; base
weights are not built. The file is bfloat16. Ours is one gather; the other is `full_tensor` of each
parameter, as checkpoint code does it. This process is rank 0, the other one goes along.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.shapes import cut_over_ranks
from benchmarks.test_snapshot import peft_model
from trl_async_bucket.gather import AdapterGather
from trl_async_bucket.snapshot import SnapshotBuffer, full_shape, lora_parameters

RANK = 16
ROUNDS, WARM_UP = 10, 2
DTYPE = torch.bfloat16


def join(meeting: Path, rank: int) -> Any:
    """Enter the process group; the model with its factors cut over both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    return cut_over_ranks(peft_model(RANK), 2)


def one_gather(model: Any) -> Callable[[], Any]:
    return AdapterGather(model, "default", dtype=DTYPE).gather


def one_collective_per_tensor(model: Any) -> Callable[[], Any]:
    parameters = lora_parameters(model, "default")
    return lambda: {name: sharded.full_tensor() for name, sharded in parameters.items()}


def go_along(meeting: Path, way: Callable[[Any], Callable[[], Any]]) -> None:
    """Rank 1."""
    gather = way(join(meeting, 1))
    for _ in range(ROUNDS + WARM_UP):
        gather()
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("way", [one_gather, one_collective_per_tensor])
@pytest.mark.benchmark(group="gather")
def test_from_two_ranks_into_one_file(
    benchmark: Any, tmp_path: Path, way: Callable[[Any], Callable[[], Any]]
) -> None:
    other = multiprocessing.get_context("spawn").Process(
        target=go_along, args=(tmp_path / "store", way)
    )
    other.start()
    try:
        model = join(tmp_path / "store", 0)
        shapes = {name: full_shape(p) for name, p in lora_parameters(model, "default").items()}
        buffer = SnapshotBuffer(shapes, dtype=DTYPE, pin_memory=False)
        gather = way(model)

        def sync() -> None:
            buffer.fill(gather())

        # The barrier stands in front of the next round: both ranks start it together.
        benchmark.pedantic(sync, setup=Barrier(), rounds=ROUNDS, warmup_rounds=WARM_UP)
        dist.barrier()
        dist.destroy_process_group()
    finally:
        other.join(30)
    assert other.exitcode == 0


class Barrier:
    """Waits for the other rank before every round but the first."""

    def __init__(self) -> None:
        self._first = True

    def __call__(self) -> None:
        if not self._first:
            dist.barrier()
        self._first = False

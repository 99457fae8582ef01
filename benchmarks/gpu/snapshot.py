"""How long does a snapshot keep the optimizer waiting, beside PEFT's ``save_pretrained``?

    python -m benchmarks.gpu.snapshot [--processes 2] [--tiny] [--out DIR]

The contenders do what a sync does before the optimizer may step again: ours gathers the factors and
fills the buffer whose bytes are the file; TRL makes every LoRA tensor whole, copies it to the host
and calls ``save_pretrained``. Before each round the parameters change, and the stream is
synchronized, so that nothing is measured that was there already.

With ``--processes 2`` the factors are cut over two GPUs as FSDP2 cuts them, over NCCL.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import report, shapes
from benchmarks.ranks import as_rank_0

COLUMNS = (
    "shape", "rank", "tensors", "file, MB",
    "ours, ms", "ours worst, ms", "to host, ms", "to host + save, ms", "goal, ms",
)  # fmt: skip
GOALS_MS = {("1.5B", 1): 0.6, ("1.5B", 16): 2.0, ("1.5B", 64): 4.0}
"""In one process."""


@dataclass(frozen=True)
class Plan:
    """What to measure, as every process gets it."""

    shapes: tuple[str, ...]
    device: str
    processes: int
    rounds: int


def main() -> None:
    """Measure all shapes and ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one small shape, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    plan = Plan(
        shapes=("tiny",) if options.tiny else ("1.5B", "7B"),
        device="cpu" if options.tiny else "cuda",
        processes=options.processes,
        rounds=5 if options.tiny else options.rounds,
    )
    backend: Literal["gloo", "nccl"] = "gloo" if options.tiny else "nccl"
    rows = as_rank_0(partial(_measure_all, plan), plan.processes, backend=backend)
    name = "snapshot" if options.processes == 1 else "snapshot_sharded"
    report.finish(name, COLUMNS, rows, options.out)


def _measure_all(plan: Plan) -> list[dict[str, Any]]:
    import torch

    if plan.device == "cpu":
        torch.set_num_threads(1)
    return [measure(plan, shape, lora_rank) for shape in plan.shapes for lora_rank in (1, 16, 64)]


def measure(plan: Plan, shape: str, lora_rank: int) -> dict[str, Any]:
    """One row of the table; times are medians in ms. All processes must call it."""
    import torch

    from trl_async_bucket.gather import AdapterGather
    from trl_async_bucket.ranks import is_rank_0
    from trl_async_bucket.snapshot import SnapshotBuffer

    model = shapes.lora_model(shape, lora_rank, plan.device)
    if plan.processes > 1:
        shapes.cut_over_ranks(model, plan.processes)
    gather = AdapterGather(model, "default", dtype=torch.bfloat16)
    buffer = SnapshotBuffer(gather.shapes, dtype=torch.bfloat16, pin_memory=plan.device == "cuda")

    def ours() -> None:
        tensors = gather.gather()
        if is_rank_0():
            buffer.fill(tensors)

    def save() -> None:
        state = shapes.lora_state(model)
        if is_rank_0():
            model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)

    def change() -> None:
        with torch.no_grad():
            torch._foreach_add_([_local(p) for p in shapes.trained(model)], 0.001)
        _settle(plan)

    times = _times_ms(ours, change, plan.rounds)
    _check(buffer, shapes.lora_state(model))
    to_host = _times_ms(lambda: shapes.lora_state(model), change, plan.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        saves = _times_ms(save, change, max(3, plan.rounds // 5))
    row = {
        "shape": shape,
        "rank": lora_rank,
        "tensors": len(gather.shapes),
        "file, MB": buffer.nbytes / 1e6,
        "ours, ms": report.percentile(times, 50),
        "ours worst, ms": max(times),
        "to host, ms": report.percentile(to_host, 50),
        "to host + save, ms": report.percentile(saves, 50),
        "goal, ms": GOALS_MS.get((shape, lora_rank)) if plan.processes == 1 else None,
    }
    if is_rank_0():
        print(row, flush=True)
    return row


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _settle(plan: Plan) -> None:
    """Wait until no GPU and no process is behind."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    if plan.device == "cuda":
        torch.cuda.synchronize()


def _times_ms(call: Callable[[], object], before: Callable[[], None], rounds: int) -> list[float]:
    times = []
    for round_ in range(rounds + 2):
        before()
        started = time.perf_counter()
        call()
        if round_ >= 2:  # the first two warm up
            times.append((time.perf_counter() - started) * 1e3)
    return times


def _check(buffer: Any, state: dict[str, Any]) -> None:
    """The bytes must be those of the parameters, or the times mean nothing."""
    import safetensors.torch
    import torch

    from trl_async_bucket.ranks import is_rank_0

    if not is_rank_0():
        return
    saved = safetensors.torch.load(bytes(buffer.data()))
    for name, tensor in saved.items():
        module, _, kind = name.rpartition(".weight")[0].rpartition(".")
        parameter = state[f"{module}.{kind}.default.weight"]
        if not torch.equal(tensor, parameter.to(torch.bfloat16)):
            raise RuntimeError(f"the snapshot of {name} is not the parameter")


if __name__ == "__main__":
    main()

"""How long a sync keeps the optimizer waiting on a CPU, beside TRL's way and a plain copy.

    python -m benchmarks.optimizer_blocked [--tiny] [--processes 1] [--rounds 8] [--out DIR]

For Qwen2.5's 0.5B, 1.5B and 7B shapes with LoRA on all linear layers, one thread a process; base
weights take no memory. Ours is what a trainer calls, with a folder and with a real S3 server behind
it: gather, snapshot, hand over to the publisher. The next one begins when that version is in the
bucket and a tenth of a second has passed, as the steps of a training are longer than that.
TRL's is its own ``save_lora_adapter`` to tmpfs. It also loads the adapter into every replica before
the optimizer may go on, which is not in its figure here (``benchmarks.side_by_side``). *Copy* casts
one tensor of all the adapter's values into the file's dtype: what the memory allows.

With ``--processes 2`` the factors are cut over two gloo processes as FSDP2 cuts them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import results
from benchmarks.buckets import Bucket, buckets
from benchmarks.gpu import shapes
from benchmarks.ranks import as_rank_0

GOAL_SHARE = 20
"""The optimizer may be blocked for this part of TRL's way."""
GOAL_MS = 10.0
"""And for this much more than the copy."""
WARM_UP = 2
LARGE_MB = 100
FEW = 4
"""Rounds of the largest files: the store keeps every one of them."""
STEP_S = 0.1
"""Between two syncs: old versions are being deleted meanwhile."""


@dataclass(frozen=True)
class Plan:
    """One row, as every process gets it."""

    shape: str
    rank: int
    rounds: int
    processes: int
    there: tuple[Bucket, ...]
    folder: Path

    @property
    def first(self) -> bool:
        """Whether this process is rank 0."""
        import torch.distributed as dist

        return not dist.is_initialized() or dist.get_rank() == 0

    def together(self) -> None:
        """Wait for the other processes."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()


def measure(plan: Plan) -> dict[str, Any] | None:
    """One row, on rank 0. All processes must call it."""
    import torch

    from trl_async_bucket.snapshot import full_shape, lora_parameters

    torch.set_num_threads(1)
    model = _model(plan)
    values = sum(full_shape(p).numel() for p in lora_parameters(model, "default").values())
    file_mb = 2 * values / 1e6
    rounds = min(plan.rounds, FEW) if file_mb > LARGE_MB else plan.rounds
    ours = {b.name: _times(plan, model, _bucket_sync(plan, model, b), rounds) for b in plan.there}
    stock = results.median_ms(_times(plan, model, _trl_sync(plan, model), rounds))
    if not plan.first:
        return None
    copied = copy_ms(values, rounds)
    slowest = max(results.median_ms(times) for times in ours.values())
    return {
        "shape": plan.shape,
        "rank": plan.rank,
        "processes": plan.processes,
        "file, MB": results.digits(file_mb),
        **{f"{name}, ms": results.median_ms(times) for name, times in ours.items()},
        "worst, ms": results.digits(1000 * max(max(times) for times in ours.values())),
        "copy, ms": copied,
        "TRL's save, ms": stock,
        "share of it": results.digits(slowest / stock),
        "over the copy, ms": results.digits(slowest - copied),
        "rounds": rounds,
    }


def _model(plan: Plan) -> Any:
    """The model, with its factors cut over the processes if there are several."""
    model = shapes.lora_model(plan.shape, plan.rank, "cpu")
    base = plan.folder / plan.shape  # TRL's save looks the base model's config up
    if plan.first:
        shapes.model_config(plan.shape).save_pretrained(base)
    plan.together()
    model.peft_config["default"].base_model_name_or_path = str(base)
    if plan.processes == 1:
        return model
    return shapes.cut_over_ranks(model, plan.processes)


def _bucket_sync(plan: Plan, model: Any, bucket: Bucket) -> _Sync:
    import torch

    from adapter_bucket.ready_policy import ReadyPolicy
    from trl_async_bucket.gather import AdapterGather
    from trl_async_bucket.settings import SyncSettings
    from trl_async_bucket.sync import BucketSync

    gather = AdapterGather(model, "default", dtype=torch.bfloat16)
    if not plan.first:
        return _Sync(lambda number: gather.gather(), lambda: None, lambda: None)
    settings = SyncSettings(
        bucket_url=bucket.url,
        run_id=f"blocked-{plan.shape}-{plan.rank}".lower().replace(".", "-"),
        ready=ReadyPolicy.parse("none"),
        window=1,
        max_lag=1,
        timeout_s=60.0,
        server_url=None,
        dtype="bfloat16",
    )
    sync = BucketSync(model, "default", settings)
    sync.start()
    return _Sync(
        lambda number: sync.take(gather.gather(), version=number, step=number),
        lambda: sync.wait_lag(0),
        sync.finish,
    )


def _trl_sync(plan: Plan, model: Any) -> _Sync:
    import torch

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

    # The two fields of an Accelerator that are read.
    job = SimpleNamespace(device=torch.device("cpu"), is_main_process=plan.first)
    target = str(plan.folder / "adapter")
    return _Sync(
        lambda _: save_lora_adapter(model, job, "default", target), lambda: None, lambda: None
    )


@dataclass(frozen=True)
class _Sync:
    """A way to sync: what blocks, what goes on meanwhile, and its end."""

    block: Callable[[int], object]
    settle: Callable[[], object]
    close: Callable[[], object]


def _times(plan: Plan, model: Any, sync: _Sync, rounds: int) -> list[float]:
    """Seconds that each round blocked this process."""
    import torch

    parameters, times = [p for p in model.parameters() if p.requires_grad], []
    for number in range(1, rounds + WARM_UP + 1):
        with torch.no_grad():
            for parameter in parameters:  # as the optimizer does before each sync
                parameter.add_(0.001)
        plan.together()
        began = time.perf_counter()
        sync.block(number)
        times.append(time.perf_counter() - began)
        sync.settle()
        time.sleep(STEP_S)
    sync.close()
    return times[WARM_UP:]


def copy_ms(values: int, rounds: int) -> float:
    """Median time to cast so many values from float32 to bfloat16 in one call."""
    import torch

    source, times = torch.full((values,), 0.5), []
    target = torch.empty(values, dtype=torch.bfloat16)
    for _ in range(rounds + WARM_UP):
        source.add_(0.001)
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return results.median_ms(times[WARM_UP:])


def _row(plan: Plan) -> dict[str, Any]:
    """The row, with this process as rank 0 of several."""
    row = as_rank_0(partial(measure, plan), plan.processes)
    if row is None:
        raise RuntimeError("this process is rank 0, and rank 0 has the row")
    print(row, flush=True)
    return row


def main() -> None:
    """Measure all shapes and ranks."""
    parser = results.arguments("optimizer_blocked", __doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.ranks, options.rounds = ["tiny"], [1], 2
    with ExitStack() as stack:
        # The store on a disk: it keeps every version's bytes. What TRL saves goes to memory.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        there = stack.enter_context(buckets(folder, [], None))
        rows = [
            _row(Plan(shape, rank, options.rounds, options.processes, tuple(there), memory))
            for shape in options.shapes
            for rank in options.ranks
        ]
    name = "optimizer_blocked" if options.processes == 1 else "optimizer_blocked_sharded"
    results.write(name, rows, options.out)


if __name__ == "__main__":
    main()

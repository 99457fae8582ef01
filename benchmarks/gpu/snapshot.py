"""How long does a snapshot keep the optimizer waiting, beside PEFT's ``save_pretrained``?

    python -m benchmarks.gpu.snapshot [--tiny] [--out DIR]

The contenders do what a sync does before the optimizer may step again: ours fills the buffer whose
bytes are the file; TRL copies every LoRA tensor to the host and calls ``save_pretrained``. Before
each round the parameters change, and the stream is synchronized, so that nothing is measured that
was there already.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import report, shapes

COLUMNS = (
    "shape", "rank", "tensors", "file, MB",
    "ours, ms", "ours worst, ms", "to host, ms", "to host + save, ms", "goal, ms",
)  # fmt: skip
GOALS_MS = {("1.5B", 1): 0.6, ("1.5B", 16): 2.0, ("1.5B", 64): 4.0}


def main() -> None:
    """Measure all shapes and ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one small shape, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    import torch

    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        torch.set_num_threads(1)
    sizes = ["tiny"] if options.tiny else ["1.5B", "7B"]
    rounds = 5 if options.tiny else options.rounds
    rows = [measure(size, rank, device, rounds) for size in sizes for rank in (1, 16, 64)]
    report.finish("snapshot", COLUMNS, rows, options.out)


def measure(shape: str, rank: int, device: str, rounds: int) -> dict[str, Any]:
    """One row of the table; times are medians in ms."""
    import torch

    from trl_async_bucket.snapshot import SnapshotBuffer, lora_parameters

    model = shapes.lora_model(shape, rank, device)
    parameters = lora_parameters(model, "default")
    buffer = SnapshotBuffer(
        {name: tuple(p.shape) for name, p in parameters.items()},
        dtype=torch.bfloat16,
        pin_memory=device == "cuda",
    )

    def change() -> None:
        with torch.no_grad():
            torch._foreach_add_(list(parameters.values()), 0.001)
        if device == "cuda":
            torch.cuda.synchronize()

    ours = _times_ms(lambda: buffer.fill(parameters), change, rounds)
    _check(buffer, parameters)
    to_host = _times_ms(lambda: shapes.lora_state(model), change, rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save = _times_ms(
            lambda: model.save_pretrained(
                folder, state_dict=shapes.lora_state(model), save_embedding_layers=False
            ),
            change,
            max(3, rounds // 5),
        )
    row = {
        "shape": shape,
        "rank": rank,
        "tensors": len(parameters),
        "file, MB": buffer.nbytes / 1e6,
        "ours, ms": report.percentile(ours, 50),
        "ours worst, ms": max(ours),
        "to host, ms": report.percentile(to_host, 50),
        "to host + save, ms": report.percentile(save, 50),
        "goal, ms": GOALS_MS.get((shape, rank)),
    }
    print(row, flush=True)
    return row


def _times_ms(call: Callable[[], object], before: Callable[[], None], rounds: int) -> list[float]:
    times = []
    for round_ in range(rounds + 2):
        before()
        started = time.perf_counter()
        call()
        if round_ >= 2:  # the first two warm up
            times.append((time.perf_counter() - started) * 1e3)
    return times


def _check(buffer: Any, parameters: Any) -> None:
    """The bytes must be those of the parameters, or the times mean nothing."""
    import safetensors.torch
    import torch

    saved = safetensors.torch.load(bytes(buffer.data()))
    for name, parameter in parameters.items():
        if not torch.equal(saved[name], parameter.detach().to(torch.bfloat16).cpu()):
            raise RuntimeError(f"the snapshot of {name} is not the parameter")


if __name__ == "__main__":
    main()

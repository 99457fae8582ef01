"""What more LoRA tensors of the same size in all cost a snapshot.

    python -m benchmarks.growth_tensors [--tiny] [--tensors 14 56 392 1568] [--out DIR]

37 MB, as rank 16 on all linear layers of a 1.5B model, in float32, on one CPU thread; cast into the
bfloat16 file as the trainer does it.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import results

VALUES = 18_464_768
"""Of rank 16 on 1.5B."""


def measure(count: int, values: int, rounds: int) -> dict[str, Any]:
    """One row."""
    import torch

    from trl_async_bucket.snapshot import SnapshotBuffer

    each = values // count
    tensors = {f"base_model.model.t{n}.lora_B.weight": torch.rand(each, 1) for n in range(count)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    buffer = SnapshotBuffer(shapes, dtype=torch.bfloat16, pin_memory=False)
    times = []
    for _ in range(rounds + 2):
        torch._foreach_add_(list(tensors.values()), 0.001)
        began = time.perf_counter()
        buffer.fill(tensors)
        times.append(time.perf_counter() - began)
    return {
        "tensors": count,
        "file, MB": round(buffer.nbytes / 1e6, 1),
        "snapshot, ms": results.median_ms(times[2:]),
        "worst, ms": results.digits(1000 * max(times[2:])),
        "rounds": rounds,
    }


def main() -> None:
    """Measure all counts."""
    parser = results.arguments("growth_tensors", __doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[14, 56, 392, 1568])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    counts, values, rounds = options.tensors, VALUES, options.rounds
    if options.tiny:
        counts, values, rounds = [2, 8], 4096, 2
    rows = [measure(count, values, rounds) for count in counts]
    results.write("growth_tensors", rows, options.out)


if __name__ == "__main__":
    main()

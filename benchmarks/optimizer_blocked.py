"""How long a sync keeps the optimizer waiting on a CPU, beside the stock way and a plain copy.

    python -m benchmarks.optimizer_blocked [--tiny] [--rounds 10] [--out DIR]

As ``benchmarks.gpu.snapshot``, whose contenders these are, for Qwen2.5's 0.5B, 1.5B and 7B shapes
on one CPU thread. *Copy* casts one tensor of all the adapter's values into the file's dtype: what
the memory allows. The stock way also loads the adapter into every replica before the optimizer may
go on, which is not in its figure here.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import results
from benchmarks.gpu import snapshot

GOAL_SHARE = 20
"""The snapshot may take this part of the stock way."""
GOAL_MS = 10.0
"""And this much more than the copy."""


def copy_ms(values: int, rounds: int) -> float:
    """Median time to cast so many values from float32 to bfloat16 in one call."""
    import torch

    source, times = torch.full((values,), 0.5), []
    target = torch.empty(values, dtype=torch.bfloat16)
    for _ in range(rounds + 2):
        source.add_(0.001)  # as the optimizer changes the parameters before each sync
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return results.median_ms(times[2:])


def measure(shape: str, rank: int, rounds: int) -> dict[str, Any]:
    """One row."""
    row = snapshot.measure(shape, rank, "cpu", rounds)
    ours, stock = row["ours, ms"], row["to host + save, ms"]
    copied = copy_ms(round(row["file, MB"] * 1e6 / 2), rounds)
    return {
        "shape": shape,
        "rank": rank,
        "file, MB": results.digits(row["file, MB"]),
        "snapshot, ms": results.digits(ours),
        "worst, ms": results.digits(row["ours worst, ms"]),
        "copy, ms": copied,
        "`save_pretrained`, ms": results.digits(stock),
        "share of it": f"1/{stock / ours:.0f}",
        "goals": "hold" if ours <= min(stock / GOAL_SHARE, copied + GOAL_MS) else "missed",
        "rounds": rounds,
    }


def main() -> None:
    """Measure all shapes and ranks."""
    parser = results.arguments("optimizer_blocked", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "1.5B", "7B"])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    shapes, rounds = (["tiny"], 2) if options.tiny else (options.shapes, options.rounds)
    rows = [measure(shape, rank, rounds) for shape in shapes for rank in (1, 16, 64)]
    results.write("optimizer_blocked", rows, options.out)


if __name__ == "__main__":
    main()

"""What a slow bucket does to staleness and drops, with a sync at every step.

``python -m benchmarks.slow_bucket`` trains the demo's policy over a real S3 server behind a link of
0, 100, 500 and 1500 ms round trip (trainer and replica alike), and prints one row for each. With
``--rtt-ms 500 --max-staleness 9`` the same for another bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.buckets import far
from benchmarks.trainings import WARM_UP_STEPS, Trainings
from demo.fleet import start_replica, wait_healthy
from demo.processes import Processes
from demo.s3_server import start_s3
from demo.summary import series, steps_only
from demo.tiny_model import build
from demo.train import MAX_STALENESS

SAMPLES_PER_STEP = 32
"""Of ``demo.train``."""


def row_of(rows: list[dict[str, Any]], rtt_ms: int, max_staleness: int) -> dict[str, Any]:
    """Figures of one run, after its first steps."""
    steps = steps_only(rows)[WARM_UP_STEPS:]

    def median(name: str) -> float:
        return statistics.median(series(steps, name) or [float("nan")])

    dropped = sum(series(steps, "sample/dropped_stale_total"))
    times = [row["time"] for row in steps]
    return {
        "round trip, ms": rtt_ms,
        "max_staleness": max_staleness,
        "step, s": round((times[-1] - times[0]) / max(len(times) - 1, 1), 2),
        "ready, s": round(median("bucket/ready_s"), 2),
        "lag": round(median("bucket/lag"), 1),
        "waited, s": round(sum(series(steps, "bucket/wait_s")), 2),
        "skipped": int(max(series(steps, "bucket/skipped"), default=0)),
        "staleness, mean": round(statistics.mean(series(steps, "sample/staleness_mean")), 2),
        "staleness, max": int(max(series(steps, "sample/staleness_max"))),
        "dropped, %": round(100 * dropped / (dropped + SAMPLES_PER_STEP * len(steps))),
    }


def main() -> None:
    """Run all, print a table and the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_bucket", description=__doc__)
    parser.add_argument("--rtt-ms", type=int, nargs="+", default=[0, 100, 500, 1500])
    parser.add_argument("--max-staleness", type=int, default=MAX_STALENESS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("demo-out/slow-bucket"))
    options = parser.parse_args()
    out = options.out.resolve()
    model = build(out / "model")
    table = []
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        s3 = start_s3(processes, out / "s3")
        with far(s3.url) as (link, bucket):
            # A slot for each of the runs' last versions, beside the window of the one that trains.
            replica = start_replica(
                processes, "replica", model, bucket, "--max-loras", "12", env=s3.env
            )
            wait_healthy(processes, [replica])
            trainings = Trainings(processes, model, out, options.steps, timeout_s=900)
            for rtt_ms in options.rtt_ms:
                link.rtt_s = rtt_ms / 1000
                name = f"rtt-{rtt_ms}"
                bound = ("--max-staleness", str(options.max_staleness))
                run = ("--bucket", bucket, "--run-id", name, *bound)
                rows = trainings.train(replica, name, *run, env=s3.env)
                table.append(row_of(rows, rtt_ms, options.max_staleness))
    print("| " + " | ".join(table[0]) + " |")
    print("|" + "---|" * len(table[0]))
    for row in table:
        print("| " + " | ".join(map(str, row.values())) + " |")
    print(json.dumps(table))


if __name__ == "__main__":
    main()

"""Wall-clock of a whole run by the latency of its bucket, beside TRL's own adapter sync.

    python -m benchmarks.end_to_end --way bucket [--rtt-ms 0 20 100] [--steps 60] [--out DIR]
    python -m benchmarks.end_to_end --way stock

The demo's task, a sync at every step, one vLLM server. The bucket is a real S3 server behind a TCP
link that delays, for trainer and replica alike. TRL's sync has no bucket: it writes a folder that
its server reads, here on the same disk, so its run is one without any latency. Steps count from the
sixth on.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.buckets import far
from benchmarks.trainings import WARM_UP_STEPS, Trainings
from demo.fleet import start_replica, start_stock_server, wait_healthy
from demo.processes import Processes
from demo.s3_server import start_s3
from demo.summary import series, steps_only
from demo.tiny_model import build

TRAINING_TIMEOUT_S = 400.0
TAIL = 20


def row_of(logged: list[dict[str, Any]], way: str, rtt_ms: int) -> dict[str, Any]:
    """Figures of one run, after its first steps."""
    steps = steps_only(logged)
    rewards = series(steps, "reward")[-TAIL:]
    steps = steps[WARM_UP_STEPS:]
    blocked, times = series(steps[1:], "perf/weight_sync_s"), [step["time"] for step in steps]
    clock_s = times[-1] - times[0]
    return {
        "sync": way,
        "bucket's round trip, ms": rtt_ms,
        "steps": len(blocked),
        "wall-clock, s": results.digits(clock_s),
        "step, median, s": results.median([b - a for a, b in pairwise(times)]),
        "blocked a sync, median, ms": results.median_ms(blocked),
        "blocked, mean, ms": results.digits(1000 * statistics.mean(blocked)),
        "time in syncs, %": results.digits(100 * sum(blocked) / clock_s),
        "snapshot to ready, s": _median(steps, "bucket/ready_s"),
        "staleness, mean": _median(steps, "sample/staleness_mean"),
        "reward, last steps": results.digits(statistics.mean(rewards)),
    }


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = series(steps, name)
    return results.median(values) if values else None


def with_bucket(out: Path, model: Path, steps: int, rtts_ms: list[int]) -> list[dict[str, Any]]:
    """One row for each round-trip time."""
    rows = []
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        s3 = start_s3(processes, out / "s3")
        with far(s3.url) as (link, url):
            # Slots for the last versions of runs that have ended, beside the one that trains.
            slots = ("--max-loras", "12")
            server = start_replica(processes, "replica", model, url, *slots, env=s3.env)
            wait_healthy(processes, [server])
            trainings = Trainings(processes, model, out, steps, timeout_s=TRAINING_TIMEOUT_S)
            for rtt_ms in rtts_ms:
                link.rtt_s = rtt_ms / 1000
                name = f"rtt-{rtt_ms}"
                run = ("--bucket", url, "--run-id", name)
                rows.append(
                    row_of(trainings.train(server, name, *run, env=s3.env), "bucket", rtt_ms)
                )
                print(rows[-1], flush=True)
    return rows


def with_stock(out: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    """One row."""
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        server = start_stock_server(processes, model)
        wait_healthy(processes, [server])
        trainings = Trainings(processes, model, out, steps, timeout_s=TRAINING_TIMEOUT_S)
        logged = trainings.train(server, "stock", "--stock")
        return [row_of(logged, "TRL's adapter sync", 0)]


def main() -> None:
    """Train one way, and write its file."""
    parser = results.arguments("end_to_end", __doc__)
    parser.add_argument("--way", choices=["bucket", "stock"], default="bucket")
    parser.add_argument("--rtt-ms", type=int, nargs="+", default=[0, 20, 100])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.tiny:
        options.rtt_ms, options.steps = [0], WARM_UP_STEPS + 3
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model = build(out / "model")
        if options.way == "bucket":
            rows = with_bucket(out, model, options.steps, options.rtt_ms)
        else:
            rows = with_stock(out, model, options.steps)
    results.write(f"end_to_end_{options.way}", rows, options.out)


if __name__ == "__main__":
    main()

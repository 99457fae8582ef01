"""What more replicas cost: time until the last one has a version, and requests to the bucket.

    python -m benchmarks.growth_watchers [--tiny] [--watchers 1 4 16 64] [--rounds 6] [--out DIR]

The plugin's own watchers without engines, up to 16 in a process, over a folder and a real S3 server
on loopback; every one is asked for each version, as a proxy passes the trainer's question on, and
polls every 0.5 s else. Versions come every 2 s. All of them share this machine's cores with the
server and the writer, which replicas on machines of their own do not.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.adapters import Adapter
from benchmarks.buckets import Bucket, buckets
from benchmarks.publish_to_ready import Trainer
from benchmarks.replicas import Replicas

PER_PROCESS = 16
POLL_S = 0.5
EVERY_S = 2.0


def grow(bucket: Bucket, adapter: Adapter, folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """One row: the last watcher's time, and requests for each version and watcher."""
    trainer = Trainer(bucket, f"growth-{count}", adapter)
    last, first, requests = [], [], Counter[str]()
    with ExitStack() as stack:
        groups = [
            stack.enter_context(
                Replicas(bucket.url, folder / f"{n}", [POLL_S] * min(PER_PROCESS, count - n))
            )
            for n in range(0, count, PER_PROCESS)
        ]
        for round_ in range(rounds + 1):
            began = time.monotonic()
            version, _, committed_at = trainer.publish()
            for group in groups:
                group.expect(trainer.name(version))
            ends = [end[2] for group in groups for end in group.ends(version).values()]
            time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
            made = [calls for group in groups for calls in group.requests()]
            if round_:  # the first one also finds the run
                last.append(max(ends) - committed_at)
                first.append(min(ends) - committed_at)
                requests.update(name for calls in made for name in calls)
    trainer.close()
    per = 1 / (rounds * count)
    return {
        "bucket": bucket.name,
        "watchers": count,
        "commit → ready, first, ms": results.median_ms(first),
        "commit → ready, last, ms": results.median_ms(last),
        "worst, ms": results.digits(1000 * max(last)),
        "manifest reads a version": round(requests["get"] * per, 2),
        "weight reads a version": round(requests["download"] * per, 2),
        "listings a version": round((requests["list"] + requests["list_dirs"]) * per, 2),
        "requests a second, all": round(requests.total() / (rounds * EVERY_S), 1),
        "rounds": rounds,
    }


def main() -> None:
    """Measure all counts on both stores."""
    parser = results.arguments("growth_watchers", __doc__)
    parser.add_argument("--watchers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.tiny:
        options.watchers, options.rounds = [2], 1
    adapter, rows = Adapter("tiny" if options.tiny else "1.5B", 1), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        if options.tiny:
            there = [Bucket("folder", (folder / "bucket").as_uri())]
        else:
            there = stack.enter_context(buckets(folder, [], 1.0))
        for number, bucket in enumerate(there):
            for count in options.watchers:
                place = folder / f"{number}-{count}"
                rows.append(grow(bucket, adapter, place, count, options.rounds))
                print(rows[-1], flush=True)
    results.write("growth_watchers", rows, options.out)


if __name__ == "__main__":
    main()

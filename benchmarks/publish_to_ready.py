"""How long from ``publish`` until a replica has the version, and in which part the time goes.

    python -m benchmarks.publish_to_ready [--tiny] [--parts hint polling] [--rounds 6] [--out DIR]

The trainer's writer and its question to the replica (the hint), the plugin's watcher and cache in a
process of their own, no engine: what ``add_lora`` takes is measured by ``benchmarks.gpu.hot_swap``.
Over a folder, a real S3 server on loopback, and the same behind a TCP link with a round-trip time
and a bandwidth for each connection. Then the same without the hint: three replicas that poll every
0.25, 1 and 5 s follow a run whose versions come at random times.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.stores import open_store
from adapter_bucket.upload import describe
from benchmarks import results
from benchmarks.adapters import Adapter
from benchmarks.buckets import Bucket, buckets
from benchmarks.recorded_store import RecordedStore
from benchmarks.replicas import Replicas
from tests.adapters import BASE
from trl_async_bucket.readiness import ReplicaClient

PHASES = ("hash", "check", "put", "commit", "notice", "get", "verify", "answer")
PARTS = ["hint", "polling"]
POLLS_S = (0.25, 1.0, 5.0)
BYTES_PER_S = 20e6
SLACK_S = 0.1
REQUESTS = 4
"""One after another, and none can be left out: put the weights, put the manifest, get the manifest,
get the weights."""


class Trainer:
    """Publishes versions of one adapter and knows when each part of it ended."""

    def __init__(self, bucket: Bucket, run_id: str, adapter: Adapter) -> None:
        self._store = RecordedStore(open_store(bucket.url))
        self._adapter, self._run_id = adapter, run_id
        self._writer = RunWriter.claim(
            self._store.as_store, run_id, base_model=BASE, window=3, writer_id="benchmark"
        )

    def publish(self) -> tuple[int, dict[str, float], float]:
        """The version, seconds of each phase, and when it was committed."""
        number = self._writer.next_version
        version = self._adapter.version(number)
        started = time.monotonic()
        describe(version["weights"])
        hash_s = time.monotonic() - started
        self._store.calls.clear()
        started = time.monotonic()
        self._writer.publish(number, **version)
        puts = [call for call in self._store.calls if call.name == "create"]
        commit = next(call for call in self._store.calls if call.name == "replace")
        put_from, put_to = min(c.began_at for c in puts), max(c.ended_at for c in puts)
        phases = {
            "hash": hash_s,
            "check": put_from - started - hash_s,
            "put": put_to - put_from,
            "commit": commit.ended_at - put_to,
        }
        return number, phases, commit.ended_at

    def name(self, version: int) -> str:
        """What rollouts call it."""
        return adapter_name(self._run_id, version)

    def close(self) -> None:
        """Say that the run has ended, so that nobody polls it any more."""
        self._writer.close(RunState.FINISHED)


def with_hint(bucket: Bucket, adapter: Adapter, folder: Path, rounds: int) -> dict[str, Any]:
    """One row: medians of the phases, in ms, and of the whole."""
    trainer = Trainer(bucket, folder.name, adapter)
    found: list[dict[str, float]] = []
    with Replicas(bucket.url, folder, [1.0], runs=folder.name) as replicas:
        client = ReplicaClient(replicas.url)
        for round_ in range(rounds + 1):
            version, phases, committed_at = trainer.publish()
            client.wait_ready(
                trainer.name(version), policy=ReadyPolicy.parse("any"), timeout_s=60.0
            )
            answered_at = time.monotonic()
            noticed_at, fetched_at, verified_at = replicas.ends(version)[0]
            ends = (committed_at, noticed_at, fetched_at, verified_at, answered_at)
            took = (end - begin for begin, end in pairwise(ends))
            phases |= dict(zip(PHASES[4:], took, strict=True))
            if round_:  # the first one also finds the run, and opens connections
                found.append(phases)
    trainer.close()
    wire_s = 2 * len(adapter.weights) / bucket.bytes_per_s if bucket.bytes_per_s else 0.0
    totals = [sum(phases.values()) for phases in found]
    return {
        "bucket": bucket.name,
        "MB": round(len(adapter.weights) / 1e6, 1),
        "publish → ready, ms": results.median_ms(totals),
        **{name: results.median_ms([p[name] for p in found]) for name in PHASES},
        "floor, ms": results.digits(1000 * (REQUESTS * bucket.rtt_s + wire_s)),
        "goal, ms": results.digits(1000 * (3 * bucket.rtt_s + wire_s + SLACK_S)),
        "worst, ms": results.digits(1000 * max(totals)),
        "rounds": rounds,
    }


def polling(bucket: Bucket, adapter: Adapter, folder: Path, rounds: int) -> dict[str, Any]:
    """One row: time until replicas that poll had the version, by their interval."""
    trainer = Trainer(bucket, folder.name, adapter)
    randomly = random.Random(1)
    took: list[list[float]] = [[] for _ in POLLS_S]
    with Replicas(bucket.url, folder, POLLS_S, runs=folder.name) as replicas:
        for round_ in range(rounds + 1):
            version, phases, committed_at = trainer.publish()
            for number, ends in replicas.ends(version).items():
                if round_:
                    took[number].append(sum(phases.values()) + ends[2] - committed_at)
            time.sleep(randomly.uniform(0, POLLS_S[-1] / 2))
    trainer.close()
    row: dict[str, Any] = {"bucket": bucket.name, "MB": round(len(adapter.weights) / 1e6, 1)}
    for poll_s, times in zip(POLLS_S, took, strict=True):
        row[f"poll {poll_s:g} s: median, ms"] = results.median_ms(times)
        row[f"poll {poll_s:g} s: worst, ms"] = results.digits(1000 * max(times))
    return {**row, "rounds": rounds}


def main() -> None:
    """Measure both parts and write a file each."""
    parser = results.arguments("publish_to_ready", __doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rtt-ms", type=int, nargs="*", default=[20, 100])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.rtt_ms, options.ranks, options.parts = 1, [20], [1], ["hint"]
    shape = "tiny" if options.tiny else "1.5B"
    adapters = [Adapter(shape, rank) for rank in options.ranks]
    hint, polled = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        there = stack.enter_context(buckets(folder, options.rtt_ms, BYTES_PER_S))
        for number, bucket in enumerate(there):
            for adapter in adapters if "hint" in options.parts else ():
                place = folder / f"hint-{number}-{adapter.rank}"
                hint.append(with_hint(bucket, adapter, place, options.rounds))
            if "polling" in options.parts:
                place = folder / f"polling-{number}"
                polled.append(polling(bucket, adapters[0], place, options.rounds))
    if hint:
        results.write("publish_to_ready", hint, options.out)
    if polled:
        results.write("polling_to_ready", polled, options.out)


if __name__ == "__main__":
    main()

"""What a replica's worker holds while it answers rollouts and no new version comes.

    python -m benchmarks.replica_memory [--requests 3200] [--with NAME=VALUE,NAME=VALUE]...

Each ``--with`` is a fresh replica with these environment variables (``--with ""``: none). Prints
eight times on the way: the worker's memory, and of its heap what is in use, free and kept by glibc,
and mapped piece by piece, all in MiB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import heap_report
from benchmarks.heap_report.sitecustomize import FOLDER, PERIOD_S
from benchmarks.process_memory import memory_mib
from benchmarks.soak import SMALL_CACHE
from benchmarks.soak_fleet import Rollouts
from demo.fleet import Server, start_replica, wait_healthy
from demo.processes import Processes
from demo.tiny_model import build
from tests.integration.plugin.runs import MadeAdapter
from tests.integration.plugin.tiny_model import make_adapter

LOOKS = 8


def main() -> None:
    """Measure each of the given environments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3200)
    parser.add_argument("--with", dest="environments", action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = build(root / "model")
        made = make_adapter(model, 1)
        for number, text in enumerate(options.environments or [""]):
            env = dict(pair.split("=", 1) for pair in text.split(",") if pair)
            print(text or "as it comes")
            print("| requests | requests/s | worker | in use | kept | mapped |")
            print("|---" * 6 + "|", flush=True)
            measure(root / str(number), model, made, env, options.requests)


def measure(root: Path, model: Path, made: MadeAdapter, env: dict[str, str], count: int) -> None:
    """Start a replica, let it answer, and print."""
    bucket, heaps = root / "bucket", root / "heaps"
    bucket.mkdir(parents=True)
    heaps.mkdir()
    report = {FOLDER: str(heaps), "PYTHONPATH": str(Path(heap_report.__file__).parent)}
    rollouts = Rollouts(model, bucket, made)
    with Processes(root / "logs", lambda _name, _line: None) as processes:
        replica = start_replica(
            processes, "replica", model, bucket.as_uri(), *SMALL_CACHE, env={**env, **report}
        )
        wait_healthy(processes, [replica])
        for look in range(1, LOOKS + 1):
            started = time.monotonic()
            rollouts.send(replica, count // LOOKS, lambda: None)
            rate = count // LOOKS / (time.monotonic() - started)
            time.sleep(2 * PERIOD_S)
            pid = worker_of(replica)
            heap = [round(float(size)) for size in (heaps / str(pid)).read_text().split()]
            row = [look * (count // LOOKS), round(rate), round(memory_mib(pid)), *heap]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def worker_of(replica: Server) -> int:
    """Process id of the replica's only worker.

    Raises:
        RuntimeError: it has none.
    """
    for child in psutil.Process(replica.child.pid).children(recursive=True):
        if "Worker" in " ".join(child.cmdline()):
            return int(child.pid)
    raise RuntimeError(f"{replica.child.name} has no worker; its log is {replica.child.log_path}")


if __name__ == "__main__":
    main()

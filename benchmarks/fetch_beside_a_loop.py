"""What a version's fetch takes beside a thread that is busy in Python, as a server's event loop is.

    python -m benchmarks.fetch_beside_a_loop [--tiny] [--rounds 5] [--out DIR]

From a ``file://`` bucket in memory, as ``vllm_bucket_lora`` does it: copy, SHA-256, a look at every
value. Beside nothing, and beside a thread that computes without end and gives the interpreter lock
away only when it is made to.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from adapter_bucket.fetch import RunReader
from adapter_bucket.publish import RunWriter
from adapter_bucket.stores import open_store
from benchmarks import results
from benchmarks.adapters import Adapter
from tests.adapters import BASE
from vllm_bucket_lora.cache import VersionCache


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that holds the interpreter lock whenever it can."""
    ended = threading.Event()

    def spin() -> None:
        count = 0
        while not ended.is_set():
            for _ in range(1000):
                count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(shape: str, rank: int, rounds: int) -> dict[str, Any]:
    """One row: medians in ms."""
    adapter, found = Adapter(shape, rank), {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = open_store(Path(folder, "bucket").as_uri())
        writer = RunWriter.claim(store, "run", base_model=BASE, window=1, writer_id="benchmark")
        writer.publish(1, **adapter.version(1))
        manifest = RunReader(store, "run").poll()
        assert manifest is not None
        for name, beside in (("alone", nullcontext), ("beside a busy thread", busy_thread)):
            times = []
            for round_ in range(rounds):
                cache = VersionCache(store, Path(folder, f"{name}-{round_}"))
                with beside():
                    began = time.perf_counter()
                    cache.fetch("run", manifest.versions[-1])
                    times.append(time.perf_counter() - began)
                cache.remove("run", 1)
            found[f"{name}, ms"] = results.median_ms(times)
    return {
        "shape": shape, "rank": rank, "MB": results.digits(len(adapter.weights) / 1e6),
        **found, "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    """Measure three sizes."""
    parser = results.arguments("fetch_beside_a_loop", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = [("tiny", 1)] if options.tiny else [("1.5B", 1), ("1.5B", 16), ("1.5B", 64)]
    rows = [measure(shape, rank, options.rounds) for shape, rank in sizes]
    results.write("fetch_beside_a_loop", rows, options.out)


if __name__ == "__main__":
    main()

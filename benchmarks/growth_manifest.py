"""What a longer window costs: size of the manifest, and what a writer and a poll do with it.

    python -m benchmarks.growth_manifest [--tiny] [--windows 1 4 16 64 256] [--out DIR]

Over a store in memory, so that only our own work is measured: to encode and decode the document, a
poll that finds a new one, and one that finds it unchanged (a 304, whatever the window).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from adapter_bucket.fetch import RunReader
from adapter_bucket.manifest import decode, encode
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from benchmarks import results
from benchmarks.adapters import Adapter
from tests.adapters import BASE


def measure(window: int, adapter: Adapter, rounds: int) -> dict[str, Any]:
    """One row: bytes, and medians in ms."""
    store = MemoryStore()
    writer = RunWriter.claim(store, "run", base_model=BASE, window=window, writer_id="benchmark")
    for number in range(1, window + 2):  # the grace version is kept as well
        writer.publish(number, **adapter.version(number))
    manifest = writer.manifest
    data = encode(manifest)
    reader = RunReader(store, "run")
    reader.poll()
    row = {
        "window": window,
        "entries": len(manifest.versions),
        "manifest, KB": round(len(data) / 1e3, 1),
        "encode, ms": _ms(lambda: encode(manifest), rounds),
        "decode, ms": _ms(lambda: decode(data, run_id="run"), rounds),
        "poll, changed, ms": _ms(lambda: RunReader(store, "run").poll(), rounds),
        "poll, unchanged, ms": _ms(reader.poll, rounds),
    }
    return row


def _ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return results.median_ms(times)


def main() -> None:
    """Measure all windows."""
    parser = results.arguments("growth_manifest", __doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options = parser.parse_args()
    if options.tiny:
        options.windows = [1, 4]
    adapter, rounds = Adapter("tiny", 1), 5 if options.tiny else 50
    rows = [measure(window, adapter, rounds) for window in options.windows]
    results.write("growth_manifest", rows, options.out)


if __name__ == "__main__":
    main()

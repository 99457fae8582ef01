"""Requests and bytes of the contract, counted, and what they cost at list prices.

``python -m benchmarks.bucket_costs`` prints the table of ``docs/sizing.md``: one run, everything at
its default.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.layout import manifest_key
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import StoredObject
from tests.adapters import BASE, version
from vllm_bucket_lora.config import OPTIONS
from vllm_bucket_lora.heartbeats import INTERVAL_S
from vllm_bucket_lora.listing import DISCOVER_S

SECONDS = 30 * 86400
POLL_S: float = next(option.default for option in OPTIONS if option.name == "poll-s")
VERSION_S = 30.0
ADAPTER_BYTES = 5e6
BEAT_OBJECTS = 2
"""A heartbeat is written for the server and for each running run."""

PRICES = {
    # Dollars per million writes and listings, per million reads, per GB to the internet. Assumed,
    # as remembered from the public lists of 2025 (AWS: us-east-1): replace them with those of your
    # contract. Hugging Face buckets are sold by storage; no price per request or byte was known.
    "AWS S3 (standard)": (5.00, 0.40, 0.09),
    "Cloudflare R2": (4.50, 0.36, 0.0),
}


def count(publishes: int = 8) -> tuple[Counter[str], Counter[str], int]:
    """Calls of a steady publish and of a poll with fetch, and the manifest's size in bytes."""
    calls: Counter[str] = Counter()

    def hook(phase: str, name: str, key: str) -> None:
        if phase == "after":
            calls[name] += 1

    store = MemoryStore(hook=hook)
    writer = RunWriter.claim(
        store, "r", base_model=BASE, window=4, writer_id="w", clock=lambda: 1.75e9
    )
    reader = RunReader(store, "r")
    before = Counter[str]()
    for number in range(1, publishes + 1):
        before = Counter(calls)
        writer.publish(number, **version(number))
    writer._reaper.shutdown(wait=True)
    publish = calls - before
    calls.clear()
    with tempfile.TemporaryDirectory() as folder:
        manifest = reader.poll()
        assert manifest is not None
        fetch_version(store, "r", manifest.versions[-1], Path(folder))
    fetch = Counter(calls)
    calls.clear()
    assert reader.poll() is None
    assert calls == {"get": 1}, "an unchanged poll is one request"
    found = store.get(manifest_key("r"))
    assert isinstance(found, StoredObject)
    return publish, fetch, len(found.data)


def table() -> str:
    """The table as Markdown."""
    publish, fetch, manifest_bytes = count()
    writes = publish["create"] + publish["replace"]
    assert writes <= 3, publish
    versions, polls = SECONDS / VERSION_S, SECONDS / POLL_S
    # At each interval, and once more when the ready versions changed.
    beats = SECONDS / INTERVAL_S + versions
    listings = SECONDS / DISCOVER_S
    lines = [
        "| store | replicas | writes, listings | reads | requests, $ a month | "
        "traffic to the internet, $ |",
        "|---|---|---|---|---|---|",
    ]
    for name, (write_price, read_price, traffic_price) in PRICES.items():
        for replicas in (1, 8, 64):
            all_writes = versions * writes + replicas * (BEAT_OBJECTS * beats + listings)
            reads = replicas * (polls + versions * (sum(fetch.values()) - 1))
            requests = (all_writes * write_price + reads * read_price) / 1e6
            traffic = replicas * versions * (ADAPTER_BYTES + manifest_bytes) / 1e9 * traffic_price
            lines.append(
                f"| {name} | {replicas} | {all_writes / 1e6:.1f} M | {reads / 1e6:.1f} M | "
                f"{requests:.2f} | {traffic:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

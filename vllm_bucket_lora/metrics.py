"""Metrics of the plugin. They appear in vLLM's own ``/metrics``, which serves the default registry.

With several API servers, vLLM switches ``prometheus_client`` to files that all processes share;
``multiprocess_mode`` says how one gauge is made of theirs.
"""

from __future__ import annotations

import contextlib
import os

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

NEWEST_READY = Gauge(
    "bucket_lora_newest_ready_version",
    "Newest version of a run that is ready; the least of all API server processes.",
    ["run"],
    multiprocess_mode="min",
)
NEWEST_PUBLISHED = Gauge(
    "bucket_lora_newest_published_version",
    "Newest version in the manifest last read.",
    ["run"],
    multiprocess_mode="max",
)
MANIFEST_CHANGED_AT = Gauge(
    "bucket_lora_manifest_changed_timestamp_seconds",
    "When this server last saw a new manifest of a run, Unix time.",
    ["run"],
    multiprocess_mode="max",
)
FETCH_SECONDS = Histogram(
    "bucket_lora_fetch_seconds",
    "Bringing one version to local disk and checking it.",
    buckets=_SECONDS,
)
LOAD_SECONDS = Histogram(
    "bucket_lora_load_seconds", "Loading one version into all engines.", buckets=_SECONDS
)
FETCHED_BYTES = Counter("bucket_lora_fetched_bytes", "Bytes of weights that became ready.")
VERSIONS = Counter(
    "bucket_lora_versions",
    "Versions by what became of them; a failed one is tried again.",
    ["outcome"],
)
PROBE_FAILURES = Counter(
    "bucket_lora_probe_failures",
    "Versions refused because an engine does not compute with them as the trainer does.",
)
POLL_FAULTS = Counter("bucket_lora_poll_faults", "Polls of a manifest or listing that failed.")
REQUESTS_HELD = Counter(
    "bucket_lora_requests_held",
    "Requests that named a version not loaded yet, by how their wait ended.",
    ["outcome"],
)

READY, REFUSED, FAILED, RETIRED = "ready", "refused", "failed", "retired"
"""Outcomes of ``VERSIONS``."""

_LORA_INFO = "vllm:lora_requests_info"


def forget_run(run_id: str) -> None:
    """Drop the figures of a run that is gone from the bucket."""
    if _shared():
        return
    for gauge in (NEWEST_READY, NEWEST_PUBLISHED, MANIFEST_CHANGED_AT):
        with contextlib.suppress(KeyError):
            gauge.remove(run_id)


def forget_adapter(name: str) -> None:
    """Drop vLLM's figures of an adapter that is gone.

    vLLM makes one for every mixture of adapters that it ever served at the same time, and keeps
    them all: 0.3 KB of ``/metrics`` for each version. To be removed once it drops them itself.
    """
    gauge = REGISTRY._names_to_collectors.get(_LORA_INFO)
    if not isinstance(gauge, Gauge) or _shared():
        return
    for metric in gauge.collect():
        for sample in metric.samples:
            if any(name in names.split(",") for names in sample.labels.values()):
                gauge.remove(*sample.labels.values())


def _shared() -> bool:
    """Whether several API servers share their figures in files, from which nothing is dropped."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ

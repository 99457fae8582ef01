"""``bucket-lora doctor``: what the bucket can do, how fast it is, and what to change."""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from adapter_bucket.capabilities import Capabilities, probe
from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import probe_key
from adapter_bucket.store import Store

ADAPTER_BYTES = 4 * 1024**2
"""Size of the test object: a rank-16 adapter of a 1.5B model's q and v projections, in bfloat16."""

_PUTS = 5
"""A put of an adapter is measured this often at most: it is the only one that moves megabytes."""


def doctor(store: Store, arguments: argparse.Namespace, console: Console) -> tuple[Any, bool]:
    """Probe the bucket and measure it; not well if anything is missing."""
    if not 1 <= arguments.samples <= 1000:
        raise ConfigError(f"--samples is {arguments.samples}; use 1 to 1000")
    found = probe(store)
    latency = _measure(store, arguments.samples)
    problems = found.consequences()
    if not arguments.json:
        _print(store, found, latency, problems, console)
    capabilities = {name: getattr(found, name) for name in Capabilities.__dataclass_fields__}
    return {
        "url": store.url,
        "capabilities": capabilities,
        "latency_ms": latency,
        "problems": problems,
    }, not problems


def _measure(store: Store, samples: int) -> dict[str, dict[str, float]]:
    small, large = (probe_key(secrets.token_hex(16)) for _ in range(2))
    adapter = secrets.token_bytes(ADAPTER_BYTES)
    try:
        etag = store.overwrite(small, b"x" * 2048)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "put 2 KB": (lambda: store.overwrite(small, b"x" * 2048), samples),
            "get 2 KB": (lambda: store.get(small), samples),
            "get unchanged (304)": (lambda: store.get(small, if_none_match=etag), samples),
            "put 4 MiB": (lambda: store.overwrite(large, adapter), min(samples, _PUTS)),
            "get 4 MiB": (lambda: store.get(large), min(samples, _PUTS)),
        }
        return {name: _percentiles(call, count) for name, (call, count) in calls.items()}
    finally:
        store.delete([small, large])


def _percentiles(call: Callable[[], object], count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1000)
    times.sort()
    return {
        "p50": round(statistics.median(times), 2),
        "p90": round(times[int(0.9 * (count - 1))], 2),
        "max": round(times[-1], 2),
    }


def _print(
    store: Store,
    found: Capabilities,
    latency: dict[str, dict[str, float]],
    problems: list[str],
    console: Console,
) -> None:
    console.print(f"{store.url}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("capability")
    table.add_column("")
    for name in (
        "round_trip",
        "conditional_create",
        "compare_and_swap",
        "conditional_get",
        "list_after_write",
        "delete",
    ):
        table.add_row(name.replace("_", " "), "yes" if getattr(found, name) else "NO")
    skew = "unknown" if found.clock_skew_s is None else f"{found.clock_skew_s:+.1f} s"
    table.add_row("clock difference", skew)
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for column in ("request", "p50 ms", "p90 ms", "max ms"):
        table.add_column(column)
    for name, figures in latency.items():
        table.add_row(name, *(f"{figures[key]:.1f}" for key in ("p50", "p90", "max")))
    console.print(table)
    for text in problems:
        console.print(f"problem: {text}", style="red", markup=False)
    if not problems:
        console.print("no problems found", style="green")

"""Memory of a server that serves version after version: flat, or growing?

    python -m benchmarks.plugin_soak [--versions 1000]

One real server, one request per version, window of 3. Afterwards the same number of requests
without new versions: what grows then is vLLM's own. Prints resident memory of the API server and
of the engine, and what lies in the local cache, every tenth of the way.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import Server, running_server
from tests.integration.plugin.tiny_model import build_base

PROMPT = list(range(32, 48))
DISTINCT = 20
"""Adapters that take turns; each version is a new name with the bytes of one of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=1000)
    count = parser.parse_args().versions
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base, bucket, cache = (Path(folder) / name for name in ("base", "bucket", "cache"))
        build_base(base)
        bucket.mkdir()
        flags = [
            "--plugin=bucket-lora",
            f"--bucket-lora-url=file://{bucket}",
            f"--bucket-lora-cache-dir={cache}",
        ]
        with running_server(str(base), Path(folder) / "server.log", flags) as server:
            run = TestRun(bucket, base, "soak")
            made = [run.make(seed) for seed in range(1, DISTINCT + 1)]

            def version(number: int) -> None:
                run.publish_made(number, made[number % DISTINCT])
                about = server.status(run.name(number), wait_s=30).adapter
                if about is None or about.state.value != "ready":
                    raise SystemExit(f"version {number}: {about}")
                server.generate(run.name(number), PROMPT)

            watch("versions", count, version, server, cache)
            watch("requests without", count, lambda _: ask(server, run, count), server, cache)


def ask(server: Server, run: TestRun, newest: int) -> None:
    server.status(run.name(newest))
    server.generate(run.name(newest), PROMPT)


def watch(what: str, count: int, step: Callable[[int], None], server: Server, cache: Path) -> None:
    print(f"| {what} | API server, MB | engine, MB | versions in cache | cache, KB |")
    print("|---|---|---|---|---|", flush=True)
    for number in range(1, count + 1):
        step(number)
        if number % max(1, count // 10) == 0:
            api, engine = resident_mb(server)
            kept = list(cache.glob("bucket-lora-*/port-*/adapters/*/v*"))
            files = [path for path in cache.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files) / 1024
            print(f"| {number} | {api:.1f} | {engine:.1f} | {len(kept)} | {size:.0f} |", flush=True)


def resident_mb(server: Server) -> tuple[float, float]:
    """Resident memory of the API server and of all engine processes."""
    group = server.process.pid
    engines = 0.0
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if entry.name.isdigit() and int(fields[2]) == group and int(entry.name) != group:
                engines += _rss_mb(entry)
        except (OSError, IndexError):
            continue
    return _rss_mb(Path(f"/proc/{group}")), engines


def _rss_mb(entry: Path) -> float:
    for line in (entry / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()

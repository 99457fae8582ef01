"""Memory of a server that serves version after version: flat, or growing? And by whom?

    python -m benchmarks.plugin_soak [--versions 1000] [--requests 1] [--stock]

One real server under the load of a rollout worker: requests of random lengths, seeded, with
log-probabilities. Three stretches: a warm-up of full batches and no new versions, in which
allocators and caches fill; then a new version for every request (window of 3); then such
requests without new versions. ``--stock`` does the same to a server without the plugin, over
vLLM's own routes for loading and unloading an adapter: what grows there is vLLM's own.

Prints the resident memory of each process, what lies in the local cache, and the size of the
``/metrics`` page, ten times a stretch.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.integration.plugin.runs import MadeAdapter, TestRun
from tests.integration.plugin.server import Server, running_server
from tests.integration.plugin.tiny_model import build_base, make_adapter

DISTINCT = 20
"""Adapters that take turns; each version is a new name with the bytes of one of them."""
WINDOW = 3
FULL_BATCH = 16
WARM_UP = 100
"""Batches."""
PROCESSES = {"vllm serve": "API server", "EngineCore": "engine core", "Worker": "worker"}
SMALL_CACHE = "--num-gpu-blocks-override=1024"
"""The pages of a KV cache count once they were used: a big one would fill for the whole time."""


class Plugin:
    """Versions come over the bucket."""

    def __init__(self, server: Server, bucket: Path, base: Path) -> None:
        self._server = server
        self._run = TestRun(bucket, base, "soak", window=WINDOW)

    def add(self, number: int, made: MadeAdapter) -> str:
        """Publish a version; return its name once it is ready."""
        self._run.publish_made(number, made)
        name = self._run.name(number)
        about = self._server.status(name, wait_s=30).adapter
        if about is None or about.state.value != "ready":
            raise SystemExit(f"{name}: {about}")
        return name


class Stock:
    """Versions come over vLLM's own routes."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._loaded: deque[str] = deque()

    def add(self, number: int, made: MadeAdapter) -> str:
        """Load a version, and unload the one that leaves the window; return its name."""
        name = f"soak-v{number}"
        path = self._folder / name
        path.mkdir(parents=True)
        (path / "adapter_model.safetensors").write_bytes(made[0])
        (path / "adapter_config.json").write_text(json.dumps(made[1]))
        self._server.text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        self._loaded.append(name)
        if len(self._loaded) > WINDOW:
            old = self._loaded.popleft()
            self._server.text("/v1/unload_lora_adapter", {"lora_name": old})
            shutil.rmtree(self._folder / old)
        return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1, help="at once, per version")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        base = build_base(root / "base")
        made = [make_adapter(base, seed) for seed in range(1, DISTINCT + 1)]
        with serving(root, base, stock=args.stock) as (server, source):
            names = [source.add(1, made[0])]

            def load(number: int, count: int = args.requests) -> None:
                choose = random.Random(number)
                recent = names[-2:]  # the oldest of the window may go while the request travels
                jobs = [(choose.choice(recent), choose.random()) for _ in range(count)]
                list(pool.map(lambda job: ask(server, *job), jobs))

            def version(number: int) -> None:
                names.append(source.add(number + 1, made[number % DISTINCT]))
                load(number)

            with ThreadPoolExecutor(FULL_BATCH) as pool:
                full = functools.partial(load, count=FULL_BATCH)
                watch("full batches", WARM_UP, full, server, root / "cache")
                watch("versions", args.versions, version, server, root / "cache")
                watch("requests", args.versions // 4, load, server, root / "cache")


@contextmanager
def serving(root: Path, base: Path, *, stock: bool) -> Iterator[tuple[Server, Plugin | Stock]]:
    """Start the server, with the plugin or without."""
    log, bucket, cache = root / "server.log", root / "bucket", root / "cache"
    if stock:
        switch = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        with running_server(str(base), log, [SMALL_CACHE], **switch) as server:
            yield server, Stock(server, cache)
        return
    bucket.mkdir()
    flags = [
        "--plugin=bucket-lora",
        f"--bucket-lora-url=file://{bucket}",
        f"--bucket-lora-cache-dir={cache}",
        SMALL_CACHE,
    ]
    with running_server(str(base), log, flags) as server:
        yield server, Plugin(server, bucket, base)


def ask(server: Server, name: str, seed: float) -> None:
    """One request of the kind that a rollout worker sends."""
    choose = random.Random(seed)
    body = {
        "model": name,
        "prompt": [choose.randrange(32, 127) for _ in range(choose.randrange(4, 64))],
        "max_tokens": choose.randrange(1, 48),
        "temperature": 1.0,
        "seed": choose.randrange(2**31),
        "logprobs": 0,
        "return_token_ids": True,
    }
    server.post("/v1/completions", body)


def watch(what: str, count: int, step: Callable[[int], None], server: Server, cache: Path) -> None:
    columns = [*PROCESSES.values(), "all, MB", "versions in cache", "cache, KB", "/metrics, KB"]
    print(f"| {what} | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|", flush=True)
    for number in range(1, count + 1):
        step(number)
        if number == 1 or number % max(1, count // 10) == 0:
            memory = resident_mb(server)
            kept = {path.parent for path in cache.rglob("adapter_model.safetensors")}
            files = [path for path in cache.rglob("*") if path.is_file()]
            row = [f"{memory[name]:.1f}" for name in PROCESSES.values()]
            row += [f"{sum(memory.values()):.1f}", str(len(kept))]
            row += [f"{sum(path.stat().st_size for path in files) / 1024:.0f}"]
            row += [f"{len(server.text('/metrics')) / 1024:.0f}"]
            print(f"| {number} | {' | '.join(row)} |", flush=True)


def resident_mb(server: Server) -> dict[str, float]:
    """Resident memory of each kind of process of the server."""
    found: dict[str, float] = defaultdict(float)
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            if not entry.name.isdigit() or int(fields[2]) != server.process.pid:
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            kind = next((name for part, name in PROCESSES.items() if part in command), "other")
            found[kind] += _rss_mb(entry)
        except (OSError, IndexError):
            continue
    return found


def _rss_mb(entry: Path) -> float:
    for line in (entry / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()

"""Memory of the proxy over many requests: of its routing state alone, and of the whole process.

    python -m benchmarks.proxy_memory [--routed 1000000] [--served 100000]

The first part routes requests as the proxy does (prompts of 200 tokens in groups of eight, a new
policy version every 20,000 requests, the one before the last retired); the second sends real ones
through a proxy process, 4,096 prompts of 512 tokens in turn. Prints resident memory ten times; what
it grows by after the first tenth is what would leak.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import deque

import uvloop

from benchmarks.proxy_decision import Bare
from benchmarks.proxy_load import Load, bodies, rss_mb, upstreams
from benchmarks.proxy_rivals import start_ours, stopping
from bucket_lora_proxy.prefix import Hasher
from bucket_lora_proxy.router import Choice, Router

REPLICAS = 16
IN_FLIGHT = 384
VERSION_REQUESTS = 20_000


def route(requests: int) -> list[float]:
    """Route so many requests. Returns the resident memory after each tenth, in MB."""
    rng = random.Random(1)
    router, hasher = Router(REPLICAS), Hasher()
    fleet = [Bare(slot) for slot in range(REPLICAS)]
    flying: deque[tuple[Choice[Bare], float]] = deque()
    content, resident = b"", []
    for number in range(requests):
        version, first = divmod(number, VERSION_REQUESTS)
        if first == 0 and version >= 2:
            router.index.drop_name(f"run-v{version - 2}")
        if number % 8 == 0:
            content = json.dumps([rng.randrange(32_000) for _ in range(200)]).encode()
        prompt = hasher.prompt(f"run-v{version}", content, 300)
        choice = router.pick(fleet, prompt)
        assert choice is not None
        flying.append((choice, router.begin(choice, prompt)))
        if len(flying) > IN_FLIGHT:
            router.end(*flying.popleft())
        if (number + 1) % (requests // 10) == 0:
            resident.append(rss_mb(os.getpid()))
    return resident


def serve(requests: int) -> tuple[int, list[float]]:
    """Send so many real requests. Returns how many it were, and the memory after each tenth."""
    served, resident = 0, []
    sent = bodies(sse=False, text=False, count=4096)
    with upstreams(2, delay_s=0.0, sse=False) as ports:
        target = start_ours(ports)
        with stopping([target]):
            for tenth in range(1, 11):
                while served < requests * tenth // 10:
                    load = Load(64, 1.0, sent)
                    load.sent = served
                    uvloop.run(load.run(target.port))
                    if load.failed:
                        raise SystemExit(f"a request failed: {load.failed[0]!r}")
                    served += len(load.took)
                resident.append(rss_mb(target.pids[0]))
    return served, resident


def show(what: str, resident: list[float]) -> None:
    """Print one line."""
    steps = " ".join(f"{size:.0f}" for size in resident)
    print(f"{what}: {steps} MB; grown by {resident[-1] - resident[0]:.1f} MB", flush=True)


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--routed", type=int, default=1_000_000)
    parser.add_argument("--served", type=int, default=100_000)
    args = parser.parse_args()
    if args.routed:
        show(f"{args.routed} requests routed among {REPLICAS} replicas", route(args.routed))
    if args.served:
        served, resident = serve(args.served)
        show(f"{served} requests served", resident)


if __name__ == "__main__":
    main()

"""What more distinct prompts cost the proxy: memory of its prefix table, and time of a decision.

    python -m benchmarks.growth_prefixes [--tiny] [--prompts 100 1000 10000 100000] [--out DIR]

Prompts of 512 token ids, each once, are routed among 16 replicas, each count in a process of its
own. What a replica is taken to hold is bounded (16,384 blocks where it does not tell its cache's
size), so memory stops growing once all of them are full: at 8,192 such prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks import results

REPLICAS = 16
TOKENS = 512
DECODE_TOKENS = 300


def measure(prompts: int) -> dict[str, Any]:
    """One row, in this process."""
    from benchmarks.proxy_decision import Bare
    from bucket_lora_proxy.prefix import Hasher
    from bucket_lora_proxy.router import Router

    rng = random.Random(1)
    router, hasher = Router(REPLICAS), Hasher()
    fleet = [Bare(slot) for slot in range(REPLICAS)]
    process, times = psutil.Process(os.getpid()), []
    before = process.memory_info().rss
    for _ in range(prompts):
        content = json.dumps([rng.randrange(32_000) for _ in range(TOKENS)]).encode()
        began = time.perf_counter()
        prompt = hasher.prompt("run-v1", content, DECODE_TOKENS)
        choice = router.pick(fleet, prompt)
        assert choice is not None
        router.end(choice, router.begin(choice, prompt))
        times.append(time.perf_counter() - began)
    grown = process.memory_info().rss - before
    return {
        "distinct prompts": prompts,
        "blocks held": sum(router.index.blocks(slot) for slot in range(REPLICAS)),
        "memory grown, MB": round(grown / 1e6, 1),
        "hash, choose and note, µs": results.digits(1000 * results.median_ms(times[-1000:])),
    }


def main() -> None:
    """Measure each count in a process of its own, so that its memory is its own."""
    parser = results.arguments("growth_prefixes", __doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    command = [sys.executable, "-m", "benchmarks.growth_prefixes", "--measure"]
    rows = []
    for prompts in [50, 100] if options.tiny else options.prompts:
        done = subprocess.run([*command, str(prompts)], check=True, capture_output=True)
        rows.append(json.loads(done.stdout))
    results.write("growth_prefixes", rows, options.out)


if __name__ == "__main__":
    main()

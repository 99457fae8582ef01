"""How long the proxy takes to decide where a request goes, by step; no network.

    python -m benchmarks.proxy_decision [--tokens 2048] [--replicas 16] [--groups 500] [--text]
                                        [--check]

Groups of eight requests share a prompt. *read*: the JSON of the body is checked and the fields that
routing needs are found; *hash*: its blocks are hashed, or the prompt is recognised; *pick*: the
replica is chosen, after which the request is sent; *note*: what the replica holds from now on.
Medians, in microseconds of the thread's own time. ``--check`` ends with 1 where *all* takes more
than ``GOAL_US``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from bucket_lora_proxy.prefix import Hasher
from bucket_lora_proxy.request_body import read_fields
from bucket_lora_proxy.router import Router

GROUP = 8
TEMPLATE_TOKENS = 23
GOAL_US = 100.0
"""For 2,048 tokens and 16 replicas."""
STEPS = ("read", "hash", "pick", "note")


@dataclass(eq=False)
class Bare:
    """All that the router needs of a replica."""

    slot: int
    outstanding: float = 0.0


def bodies(count: int, tokens: int, *, text: bool) -> list[bytes]:
    """Request bodies with different prompts that begin alike."""
    rng = random.Random(1)
    template = [rng.randrange(32_000) for _ in range(TEMPLATE_TOKENS)]
    made = []
    for _ in range(count):
        ids = template + [rng.randrange(32_000) for _ in range(tokens - TEMPLATE_TOKENS)]
        prompt: object = "".join(f"{number % 1000:03} " for number in ids) if text else ids
        made.append(json.dumps({"model": "run-v1", "prompt": prompt, "max_tokens": 300}).encode())
    return made


def decide(fleet: list[Bare], router: Router, hasher: Hasher, body: bytes) -> list[float]:
    """Route one request; returns seconds by step."""
    clock = time.thread_time
    times = [clock()]
    fields = read_fields(body)
    times.append(clock())
    prompt = hasher.prompt(*fields)
    times.append(clock())
    choice = router.pick(fleet, prompt)
    assert choice is not None
    times.append(clock())
    work = router.begin(choice, prompt)
    times.append(clock())
    router.end(choice, work)
    return [after - before for before, after in pairwise(times)]


def main() -> int:
    """Print one line for the first of a group, and one for the others; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--text", action="store_true", help="prompts of text, not of token ids")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    fleet = [Bare(slot) for slot in range(args.replicas)]
    router, hasher = Router(args.replicas), Hasher()
    first, others = [], []
    for body in bodies(args.groups, args.tokens, text=args.text):
        first.append(decide(fleet, router, hasher, body))
        others += [decide(fleet, router, hasher, body) for _ in range(GROUP - 1)]
    missed = False
    print(f"{'µs':18}", *(f"{step:>6}" for step in STEPS), "  sent   all")
    for name, rows in (("first of a group", first), ("others", others)):
        steps = [statistics.median(column) * 1e6 for column in zip(*rows, strict=True)]
        sent = statistics.median(sum(row[:3]) for row in rows) * 1e6
        whole = statistics.median(sum(row) for row in rows) * 1e6
        print(f"{name:18}", *(f"{step:6.1f}" for step in steps), f"{sent:6.1f}{whole:6.1f}")
        missed |= whole > GOAL_US
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Simulated GRPO load on the proxy's router, as it is: prefix affinity and balance.

    python benchmarks/proxy_affinity.py [--check]

A replica here is a batch that advances in steps, each as long as its batch and its uncached prefill
make it, with a block cache that evicts by age. ``--requests`` are kept in flight, in the order in
which a trainer sends them (the rollouts of a prompt one after another). A request counts as a hit
if its replica really holds all whole blocks of what was sent before: the prompt (for a first turn),
or the turn before (for later turns).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from bucket_lora_proxy.prefix import BLOCK_TOKENS, Hasher
from bucket_lora_proxy.router import Choice, Router

PROMPTS = 1460
ROLLOUTS = 8
TEMPLATE_TOKENS = 23
CACHE_BLOCKS = 24_000
"""Per replica: 384,000 tokens. With half of it, 384 conversations of three turns do not fit into
two replicas, and no router can reach the bound."""
STEP_S = 0.012
STEP_PER_REQUEST_S = 0.00006
PREFILL_TOKEN_S = 0.00002


@dataclass(eq=False)
class Simulated:
    """One replica."""

    slot: int
    outstanding: float = 0.0
    served: int = 0
    work: float = 0.0
    in_flight: int = 0
    area: float = 0.0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def holds(self, chain: tuple[int, ...]) -> bool:
        return all(block in self.cache for block in chain)

    def admit(self, chain: tuple[int, ...]) -> int:
        """Take a prompt into the cache. Returns how many of its tokens had to be computed."""
        missing = 0
        for block in reversed(chain):
            missing += block not in self.cache
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return missing * BLOCK_TOKENS

    def seconds(self, uncached: int, decode: int) -> float:
        step = STEP_S + STEP_PER_REQUEST_S * self.in_flight
        return uncached * PREFILL_TOKEN_S + decode * step


@dataclass
class Rollout:
    """A conversation; one turn after another."""

    ids: list[int]
    turns: int
    seed: int
    before: tuple[int, ...] = ()


def conversations(turns: int, rng: random.Random, order: str) -> Iterator[Rollout]:
    """All rollouts of the run, in the order in which they are sent."""
    template = [rng.randrange(32_000) for _ in range(TEMPLATE_TOKENS)]
    groups = []
    for _ in range(PROMPTS):
        body = [rng.randrange(32_000) for _ in range(rng.randint(40, 400))]
        groups.append([Rollout(template + body, turns, rng.random().__hash__()) for _ in range(8)])
    if order == "grouped":
        yield from itertools.chain.from_iterable(groups)
    else:  # the whole batch repeated eight times, as some trainers send it
        size = 64
        for start in range(0, PROMPTS, size):
            for number in range(ROLLOUTS):
                yield from (group[number] for group in groups[start : start + size])


@dataclass
class Result:
    """Figures of one run."""

    affinity: float
    possible: float
    spills: float
    served_ratio: float
    load_ratio: float
    decision_us: float


def simulate(*, replicas: int, in_flight: int, turns: int, order: str, seed: int = 1) -> Result:
    """Run one load to its end."""
    rng = random.Random(seed)
    router = Router(replicas)
    for slot in range(replicas):
        router.index.set_capacity(slot, CACHE_BLOCKS)
    hasher = Hasher()
    fleet = [Simulated(slot) for slot in range(replicas)]
    waiting = conversations(turns, rng, order)
    events: list[tuple[float, int, Simulated, Choice[Simulated], float, Rollout]] = []
    count = itertools.count()
    now = spent = 0.0
    hits = spills = sent = possible = 0
    seen: set[int] = set()

    def send(rollout: Rollout) -> None:
        nonlocal spent, hits, spills, sent, possible
        content = json.dumps(rollout.ids).encode()
        begun = time.perf_counter()
        prompt = hasher.prompt("run-v1", content, 300)
        choice = router.pick(fleet, prompt)
        assert choice is not None
        work = router.begin(choice, prompt)
        spent += time.perf_counter() - begun
        replica, chain = choice.replica, prompt.chains[0]
        needed = rollout.before or chain
        possible += bool(rollout.before) or chain[-1] in seen
        seen.add(chain[-1])
        hits += replica.holds(needed)
        spills += choice.outcome == "spill"
        sent += 1
        decode = max(8, int(rng.lognormvariate(5.4, 0.6)))
        uncached = replica.admit(chain)
        replica.served += 1
        replica.work += uncached + decode
        replica.in_flight += 1
        end = now + replica.seconds(uncached, decode)
        rollout.before = chain
        heapq.heappush(events, (end, next(count), replica, choice, work, rollout))
        rollout.ids = rollout.ids + [rng.randrange(32_000) for _ in range(decode + 60)]

    for rollout in itertools.islice(waiting, in_flight):
        send(rollout)
    while events:
        end, _, replica, choice, work, rollout = heapq.heappop(events)
        for simulated in fleet:
            simulated.area += simulated.in_flight * (end - now)
        now = end
        router.end(choice, work)
        replica.in_flight -= 1
        rollout.turns -= 1
        following = rollout if rollout.turns else next(waiting, None)
        if following is not None:
            send(following)
    assert all(abs(simulated.outstanding) < 1e-6 for simulated in fleet)
    computed = [simulated.work for simulated in fleet]
    area = [simulated.area for simulated in fleet]
    return Result(
        affinity=hits / sent,
        possible=possible / sent,
        spills=spills / sent,
        served_ratio=max(computed) * replicas / sum(computed),
        load_ratio=max(area) * replicas / sum(area),
        decision_us=spent / sent * 1e6,
    )


def main() -> int:
    """Print the table; with ``--check``, fail if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    print(
        "turns  order    replicas  in flight  affinity  possible  spills  work   load   µs/decision"
    )
    missed = 0
    for turns, order, replicas, in_flight in itertools.product(
        (1, 3), ("grouped", "batched"), (2, 3, 16), (128, 384)
    ):
        result = simulate(replicas=replicas, in_flight=in_flight, turns=turns, order=order)
        good = result.affinity >= result.possible * 86 / 87.5
        good = good and result.served_ratio <= 1.1 and result.load_ratio <= 1.1
        missed += not good
        print(
            f"{turns:5}  {order:7}  {replicas:8}  {in_flight:9}  {result.affinity:8.1%}  "
            f"{result.possible:8.1%}  {result.spills:6.1%}  {result.served_ratio:.3f}  "
            f"{result.load_ratio:.3f}  {result.decision_us:6.1f}{'' if good else '  MISSED'}"
        )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())

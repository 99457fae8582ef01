"""How much throughput a server loses while it swaps adapters, against the same server without.

    python -m benchmarks.plugin_swap_dip [--pairs 11] [--window-s 10] [--every-s 2]

One real server, 16 requests in flight all the time. Windows without swaps and windows with one swap
every two seconds take turns, and who goes first changes too. Tokens are counted by the engine. The
model is large enough that the engine's computing is what limits the rate: on a smaller one, the
load generator does, and what publisher and server do beside the engine takes its time. Prints every
window, both medians, and how much less the window with swaps of a pair had, with the interval in
which the mean lies.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import Server, running_server
from tests.integration.plugin.tiny_model import build_base

IN_FLIGHT = 16
MAX_TOKENS = 128
PROMPT = list(range(32, 64))
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RANK = 8
WARM_UP_S = 10.0
SETTLE_S = 2.5
"""Between two windows: the version that left is taken out of the engine two seconds later."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11, help="windows of each kind")
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two swaps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base, bucket = build_base(Path(folder) / "base", **SHAPE), Path(folder) / "bucket"
        bucket.mkdir()
        flags = [
            "--plugin=bucket-lora",
            f"--bucket-lora-url=file://{bucket}",
            f"--max-lora-rank={RANK}",
        ]
        with running_server(str(base), Path(folder) / "server.log", flags) as server:
            run = TestRun(bucket, base, "dip")
            bench = Bench(server, run)
            bench.prepare()
            bench.measure(args.pairs, args.window_s, args.every_s)


class Bench:
    """A server under constant load, and a run whose versions it follows."""

    def __init__(self, server: Server, run: TestRun) -> None:
        self._server, self._run = server, run
        self._newest = 1
        self._done = threading.Event()

    def prepare(self) -> None:
        """Make all adapters ahead of time: that is the trainer's work, on another machine."""
        self._made = [self._run.make(version % 20 + 1, rank=RANK) for version in range(20)]
        self._run.publish_made(1, self._made[0])
        self._server.status(self._run.name(1), wait_s=30)

    def measure(self, pairs: int, window_s: float, every_s: float) -> None:
        without: list[float] = []
        swapping: list[float] = []
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            clients = [pool.submit(self._client) for _ in range(IN_FLIGHT)]
            try:
                time.sleep(WARM_UP_S)
                for pair in range(pairs):
                    for swap in (False, True) if pair % 2 else (True, False):
                        time.sleep(SETTLE_S)
                        rate = self._window(window_s, every_s if swap else None)
                        (swapping if swap else without).append(rate)
                        print(f"{'swaps' if swap else 'quiet'} {rate:,.0f} tokens/s", flush=True)
            finally:
                self._done.set()
            for client in clients:
                client.result()
        report(without, swapping, self._newest - 1)

    def _client(self) -> None:
        while not self._done.is_set():
            self._server.generate(self._run.name(self._newest), PROMPT, max_tokens=MAX_TOKENS)

    def _window(self, window_s: float, every_s: float | None) -> float:
        started, tokens = time.monotonic(), self._tokens()
        end, due = started + window_s, started
        while (now := time.monotonic()) < end:
            if every_s is not None and now >= due:
                due += every_s
                self._swap()
            time.sleep(0.02)
        return (self._tokens() - tokens) / (time.monotonic() - started)

    def _swap(self) -> None:
        version = self._newest + 1
        self._run.publish_made(version, self._made[version % len(self._made)])
        self._server.status(self._run.name(version), wait_s=10)
        self._newest = version

    def _tokens(self) -> float:
        page = self._server.text("/metrics")
        found = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))


def report(without: list[float], swapping: list[float], swaps: int) -> None:
    quiet, busy = statistics.median(without), statistics.median(swapping)
    low, _, high = statistics.quantiles(without, n=4)
    dips = [100 * (1 - b / q) for b, q in zip(swapping, without, strict=True)]
    least, most = confidence(dips)
    print(f"{swaps} swaps; medians: quiet {quiet:,.0f}, with swaps {busy:,.0f} tokens/s")
    print(f"dip within pairs: mean {statistics.mean(dips):.1f} %, median", end=" ")
    print(f"{statistics.median(dips):.1f} %; the mean lies in {least:.1f} … {most:.1f} % (95 %)")
    print(f"half of the quiet windows lie within {100 * (high - low) / quiet:.1f} % of each other")


def confidence(values: list[float]) -> tuple[float, float]:
    """Where the mean lies with 95 %, by drawing from the values again and again."""
    choose = random.Random(0)
    means = sorted(statistics.mean(choose.choices(values, k=len(values))) for _ in range(10_000))
    return means[250], means[-251]


if __name__ == "__main__":
    main()

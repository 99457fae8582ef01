"""How much throughput a server loses while it swaps adapters, against the same server without.

    python -m benchmarks.plugin_swap_dip [--pairs 8] [--window-s 8] [--every-s 2]

One real server, 16 requests in flight all the time. Windows without swaps and windows with one swap
every two seconds take turns, and who goes first changes too. Tokens are counted by the engine. The
publisher runs on the same machine, so its work counts as well. Prints every window, both medians,
the dip, and the spread of the windows without swaps: a dip below that is noise.
"""

from __future__ import annotations

import argparse
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
WARM_UP_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8, help="windows of each kind")
    parser.add_argument("--window-s", type=float, default=8.0)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two swaps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base, bucket = build_base(Path(folder) / "base"), Path(folder) / "bucket"
        bucket.mkdir()
        flags = ["--plugin=bucket-lora", f"--bucket-lora-url=file://{bucket}"]
        with running_server(str(base), Path(folder) / "server.log", flags) as server:
            run = TestRun(bucket, base, "dip")
            bench = Bench(server, run)
            bench.prepare(1 + int(args.pairs * args.window_s / args.every_s + args.pairs))
            bench.measure(args.pairs, args.window_s, args.every_s)


class Bench:
    """A server under constant load, and a run whose versions it follows."""

    def __init__(self, server: Server, run: TestRun) -> None:
        self._server, self._run = server, run
        self._newest = 1
        self._done = threading.Event()

    def prepare(self, versions: int) -> None:
        """Make all adapters ahead of time: that is the trainer's work, on another machine."""
        self._made = [self._run.make(version % 20 + 1) for version in range(versions)]
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
        self._run.publish_made(version, self._made[version - 1])
        self._server.status(self._run.name(version), wait_s=10)
        self._newest = version

    def _tokens(self) -> float:
        page = self._server.text("/metrics")
        found = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))


def report(without: list[float], swapping: list[float], swaps: int) -> None:
    quiet, busy = statistics.median(without), statistics.median(swapping)
    low, _, high = statistics.quantiles(without, n=4)
    ratios = [b / q for b, q in zip(swapping, without, strict=True)]
    print(f"{swaps} swaps; medians: quiet {quiet:,.0f}, with swaps {busy:,.0f} tokens/s")
    print(f"dip of the medians {100 * (1 - busy / quiet):.1f} %")
    print(f"dip within pairs, median {100 * (1 - statistics.median(ratios)):.1f} %")
    print(f"half of the quiet windows lie within {100 * (high - low) / quiet:.1f} % of each other")


if __name__ == "__main__":
    main()

"""How much throughput a server loses while it swaps adapters, and where the time goes.

    python -m benchmarks.plugin_swap_dip [--rounds 7] [--window-s 10] [--every-s 2] [--probes]

One real server, 16 requests in flight all the time, of different lengths. Three kinds of windows
take turns, and who goes first changes too:

* ``quiet``: no swaps.
* ``beside``: a swap every two seconds, but requests name a version of another run: what the loading
  alone costs.
* ``swaps``: a swap every two seconds, and new requests name the newest version, as in training.

Adapters are made ahead, as that is the trainer's work; publishing them is done here. With
``--probes`` each version carries a probe, which the engine evaluates. Prompts are shorter than a
block of the prefix cache, so a new name costs no second prefill.

On a CPU all else shares the cores with the engine, and other programs may too. So three figures
are told apart: tokens a second; tokens a second of the time in which the engine's thread had a
core or did not want one, which no other thread can change, but a stall would; and the CPU time
that a swap takes beside that thread, as a share of all cores. Gaps are those between the tokens of
two clients that stream.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from adapter_bucket.probe import Probe
from benchmarks.plugin_cpu import used
from benchmarks.plugin_swap_report import KINDS, Window, report, told
from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import API_KEY, Server, running_server
from tests.integration.plugin.tiny_model import build_base

IN_FLIGHT = 16
STREAMING = 2
"""Of them, so many get their answer token by token."""
PROMPT = list(range(32, 64))
LENGTHS = (64, 192)
"""Tokens of an answer: requests that end together would start together ever after."""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RANK = 8
MADE = 20
"""Adapters that take turns; each version is a new name with the bytes of one of them."""
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine's process runs the model, as on one GPU. vLLM's CPU build else starts a worker for it,
and the two wait for one another spinning, so that the time they run says nothing."""
WARM_UP_S = 10.0
SETTLE_S = 2.5
"""Between two windows: the version that left is taken out of the engine two seconds later."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="windows of each kind")
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two swaps")
    parser.add_argument("--probes", action="store_true", help="each version carries a probe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        base, bucket = build_base(Path(folder) / "base", **SHAPE), Path(folder) / "bucket"
        bucket.mkdir()
        flags = [
            "--plugin=bucket-lora",
            f"--bucket-lora-url=file://{bucket}",
            f"--max-lora-rank={RANK}",
        ]
        with running_server(str(base), Path(folder) / "server.log", flags, **ONE_PROCESS) as server:
            run, other = TestRun(bucket, base, "dip"), TestRun(bucket, base, "other")
            bench = Bench(server, run, other, probes=args.probes)
            bench.prepare()
            windows = bench.measure(args.rounds, args.window_s, args.every_s)
            report(windows, args.every_s)


class Bench:
    """A server under constant load, and two runs: one swaps, one has a single version."""

    def __init__(self, server: Server, run: TestRun, other: TestRun, *, probes: bool) -> None:
        self._server, self._run, self._other = server, run, other
        self._probes_wanted = probes
        self._newest = 1
        self._named = other.name(1)
        self._done = threading.Event()
        self._gaps: list[float] = []

    def prepare(self) -> None:
        """Make all adapters ahead of time: that is the trainer's work, on another machine."""
        self._made = [self._run.make(number + 1, rank=RANK) for number in range(MADE)]
        self._probes: list[Probe | None] = [None] * MADE
        if self._probes_wanted:
            self._probes = [self._run.probe_of(made, PROMPT) for made in self._made]
        for run in (self._other, self._run):
            self._publish(run, 1)

    def measure(self, rounds: int, window_s: float, every_s: float) -> list[Window]:
        """Windows of all kinds in turn, under load."""
        windows: list[Window] = []
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            clients = [pool.submit(self._client, number) for number in range(IN_FLIGHT)]
            try:
                time.sleep(WARM_UP_S)
                for number in range(rounds):
                    turn = number % len(KINDS)
                    for kind in (*KINDS[turn:], *KINDS[:turn]):
                        windows.append(self._window(kind, window_s, every_s))
                        print(told(windows[-1]), flush=True)
            finally:
                self._done.set()
            for client in clients:
                client.result()
        return windows

    def _client(self, number: int) -> None:
        choose = random.Random(number)
        while not self._done.is_set():
            name, length = self._named, choose.randint(*LENGTHS)
            if number < STREAMING:
                for gap in stream(self._server, name, length):
                    self._gaps.append(gap)  # to the list of the window that is on now
            else:
                self._server.generate(name, PROMPT, max_tokens=length)

    def _window(self, kind: str, window_s: float, every_s: float) -> Window:
        self._named = self._run.name(self._newest) if kind == "swaps" else self._other.name(1)
        time.sleep(SETTLE_S)  # most requests name it now
        self._gaps = []
        started, tokens, before = time.monotonic(), self._tokens(), used(self._server.process.pid)
        end, due = started + window_s, started
        while (now := time.monotonic()) < end:
            if kind != "quiet" and now >= due:
                due += every_s
                self._swap(named=kind == "swaps")
            time.sleep(0.02)
        ended = time.monotonic()
        after = used(self._server.process.pid)
        rate = (self._tokens() - tokens) / (ended - started)
        return Window(kind, ended - started, rate, sorted(self._gaps), after.since(before))

    def _swap(self, *, named: bool) -> None:
        self._newest += 1
        self._publish(self._run, self._newest)
        if named:
            self._named = self._run.name(self._newest)

    def _publish(self, run: TestRun, version: int) -> None:
        turn = version % MADE
        run.publish_made(version, self._made[turn], probe=self._probes[turn])
        about = self._server.status(run.name(version), wait_s=20).adapter
        if about is None or about.state.value != "ready":
            raise SystemExit(f"{run.name(version)}: {about}")

    def _tokens(self) -> float:
        page = self._server.text("/metrics")
        found = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))


def stream(server: Server, name: str, length: int) -> Iterator[float]:
    """Send a request whose answer comes token by token; yield the seconds between them."""
    body = {
        "model": name, "prompt": PROMPT, "max_tokens": length, "temperature": 0, "stream": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{name}: {answer.read().decode()}")
        times = (time.monotonic() for line in answer if line.startswith(b"data: {"))
        for earlier, later in pairwise(times):
            yield later - earlier
    finally:
        connection.close()


if __name__ == "__main__":
    main()

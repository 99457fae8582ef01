"""Requests per second, CPU and added latency of the proxy, beside a direct connection.

    python benchmarks/proxy_throughput.py [--seconds 4] [--also NAME=PORT …]

Load generator, proxy and two stand-in replicas are processes on this machine, so figures compare
within one run only. A request is a 512-token prompt out of groups of eight, an answer 4 KB of JSON.
Another proxy can be measured in the same run with ``--also``; its replicas are the ports that are
printed first, and ``--pause`` gives time to start it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import cast

import uvloop

MODEL = "run-v1"
PROMPT_TOKENS = 512
GROUP = 8
ANSWER = json.dumps({"id": "x", "choices": [{"text": "y" * 3960}], "usage": {}}).encode()
STATUS = {
    "replica_id": "stand-in",
    "base_model": "base",
    "dtype": "float32",
    "max_loras": 4,
    "max_lora_rank": 8,
    "ready": [MODEL],
}
MODELS = {"data": [{"id": "base", "parent": None}, {"id": MODEL, "parent": "base"}]}


class Upstream(asyncio.Protocol):
    """The cheapest server that can stand in for a replica."""

    delay_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            match = re.search(rb"content-length: *(\d+)", head)
            whole = end + 4 + (int(match[1]) if match else 0)
            if len(self.buffer) < whole:
                return
            self.buffer = self.buffer[whole:]
            self.respond(head)

    def respond(self, head: bytes) -> None:
        body = ANSWER
        if head.startswith(b"get /bucket_lora/status"):
            body = json.dumps(STATUS).encode()
        elif head.startswith(b"get /v1/models"):
            body = json.dumps(MODELS).encode()
        elif head.startswith(b"get "):
            body = b""
        kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        answer = kind + str(len(body)).encode() + b"\r\n\r\n" + body
        if self.delay_s and head.startswith(b"post"):
            asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, answer)
        else:
            self.transport.write(answer)


def run_upstream(ready: multiprocessing.Queue[int], delay_s: float) -> None:
    """Serve on a free port until killed."""

    async def serve() -> None:
        Upstream.delay_s = delay_s
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Upstream, "127.0.0.1", 0, backlog=1024)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


class Client(asyncio.Protocol):
    """One connection of the load generator: a request as soon as the answer before is complete."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = bytearray()
        self.send()

    def send(self) -> None:
        self.begun = time.perf_counter()
        if self.begun < self.load.end:
            self.transport.write(self.load.next())
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        match = re.search(rb"content-length: *(\d+)", bytes(self.buffer[:end]).lower())
        if match is None or not self.buffer.startswith(b"HTTP/1.1 200"):
            self.load.failed.append(bytes(self.buffer[:500]))
            self.transport.close()
        elif len(self.buffer) >= end + 4 + int(match[1]):
            self.load.took.append(time.perf_counter() - self.begun)
            self.buffer.clear()
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.open -= 1
        if self.load.open == 0:
            self.load.done.set_result(None)


class Load:
    """Closed-loop load on one port."""

    def __init__(self, connections: int, seconds: float) -> None:
        self.connections = self.open = connections
        self.seconds = seconds
        self.took: list[float] = []
        self.failed: list[bytes] = []
        rng = random.Random(1)
        self.requests = []
        for _ in range(64):
            ids = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS)]
            body = json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 16}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            self.requests.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.sent = 0

    def next(self) -> bytes:
        self.sent += 1
        return self.requests[self.sent // GROUP % len(self.requests)]

    async def run(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.end = time.perf_counter() + self.seconds
        for _ in range(self.connections):
            await loop.create_connection(lambda: Client(self), "127.0.0.1", port)
        await self.done


@dataclass
class Figures:
    """One row."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float | None
    rss_mb: float | None


def measure(port: int, *, connections: int, seconds: float, pid: int | None) -> Figures:
    """Load one port, after a short warm-up."""
    uvloop.run(Load(connections, 0.5).run(port))
    before = cpu_s(pid)
    load = Load(connections, seconds)
    begun = time.perf_counter()
    uvloop.run(load.run(port))
    took = time.perf_counter() - begun
    if load.failed:
        raise SystemExit(f"{len(load.failed)} requests failed, first: {load.failed[0]!r}")
    spent = cpu_s(pid) - before
    ordered = sorted(load.took)
    return Figures(
        per_s=len(ordered) / took,
        p50_ms=statistics.median(ordered) * 1e3,
        p99_ms=ordered[int(len(ordered) * 0.99)] * 1e3,
        cpu_us=spent / len(ordered) * 1e6 if pid else None,
        rss_mb=rss_mb(pid) if pid else None,
    )


def cpu_s(pid: int | None) -> float:
    """CPU time of a process so far."""
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def start_proxy(ports: list[int]) -> tuple[subprocess.Popen[str], int]:
    """Start the proxy and wait until both replicas are in rotation."""
    replicas = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "bucket_lora_proxy", "--port", "0", *replicas],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        if match := re.search(r"ready on http://127\.0\.0\.1:(\d+)", line):
            port = int(match[1])
            break
    for _ in range(100):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            page = answer.read().decode()
        if len(re.findall(r"replica_up\{.*\} 1\.0", page)) == len(ports):
            return process, port
        time.sleep(0.05)
    raise SystemExit("the replicas never joined")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time a replica takes")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PORT")
    args = parser.parse_args()
    ready: multiprocessing.Queue[int] = multiprocessing.Queue()
    upstreams = [
        multiprocessing.Process(target=run_upstream, args=(ready, args.delay_ms / 1e3), daemon=True)
        for _ in range(2)
    ]
    for upstream in upstreams:
        upstream.start()
    ports = [ready.get(timeout=10) for _ in upstreams]
    print("replicas on ports", *ports, flush=True)
    time.sleep(args.pause)
    process, port = start_proxy(ports)
    targets: list[tuple[str, int, int | None]] = [
        ("direct", ports[0], None),
        ("proxy", port, process.pid),
    ]
    for also in args.also:
        name, _, other = also.partition("=")
        targets.append((name, int(other), None))
    print("target     conns    req/s   p50 ms   p99 ms   CPU µs   RSS MB   (medians of rounds)")
    try:
        for connections in args.connections:
            rounds: dict[str, list[Figures]] = {}
            for _ in range(args.rounds):
                for name, where, pid in targets:
                    figures = measure(where, connections=connections, seconds=args.seconds, pid=pid)
                    rounds.setdefault(name, []).append(figures)
            for name, rows in rounds.items():
                row = sorted(rows, key=lambda figures: figures.per_s)[len(rows) // 2]
                cpu = f"{row.cpu_us:8.0f}" if row.cpu_us is not None else "       –"
                rss = f"{row.rss_mb:8.0f}" if row.rss_mb is not None else "       –"
                print(
                    f"{name:10} {connections:5} {row.per_s:8.0f} {row.p50_ms:8.2f} "
                    f"{row.p99_ms:8.2f} {cpu} {rss}",
                    flush=True,
                )
    finally:
        process.terminate()
        process.wait()
        for upstream in upstreams:
            upstream.kill()


if __name__ == "__main__":
    main()

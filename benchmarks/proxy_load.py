"""Load for a proxy, and the replicas behind it: both as cheap as they can be.

The stand-in replica answers 4 KB, as JSON or as 16 server-sent events; the load generator keeps a
number of connections busy, each with a request at a time: a prompt of 512 tokens out of groups of
eight.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import uvloop

MODEL = "run-v1"
PROMPT_TOKENS = 512
GROUP = 8
EVENTS = 16
ANSWER_BYTES = 4096
STATUS = {
    "replica_id": "stand-in",
    "base_model": "base",
    "dtype": "float32",
    "max_loras": 4,
    "max_lora_rank": 8,
    "ready": [MODEL],
}
CARDS = {"data": [{"id": "base", "parent": None}, {"id": MODEL, "parent": "base"}]}
ANSWER = json.dumps({"id": "x", "choices": [{"text": "y" * 3960}], "usage": {}}).encode()
EVENT = b"data: " + b"y" * (ANSWER_BYTES // EVENTS - 8) + b"\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PIECES = [b"%x\r\n%s\r\n" % (len(EVENT), EVENT)] * EVENTS + [b"0\r\n\r\n"]
LAST = b"\r\n0\r\n\r\n"


class Upstream(asyncio.Protocol):
    """The cheapest server that can stand in for a replica."""

    delay_s = 0.0
    sse = False

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
        if head.startswith(b"post"):
            if self.sse:
                self.transport.write(STREAM_HEAD)
                self.stream(0)
            else:
                self.later(self.delay_s, framed(ANSWER))
        elif head.startswith(b"get /bucket_lora/status"):
            self.transport.write(framed(json.dumps(STATUS).encode()))
        elif head.startswith(b"get /v1/models"):
            self.transport.write(framed(json.dumps(CARDS).encode()))
        else:
            self.transport.write(framed(b"{}"))

    def later(self, delay_s: float, data: bytes) -> None:
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self.transport.write, data)
        else:
            self.transport.write(data)

    def stream(self, number: int) -> None:
        """Write one event in a turn of the loop of its own, then see to the next."""
        loop = asyncio.get_running_loop()
        self.transport.write(PIECES[number])
        if number + 1 < len(PIECES):
            loop.call_later(self.delay_s / EVENTS, self.stream, number + 1)


def framed(body: bytes) -> bytes:
    """An answer with its length."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _serve(ready: multiprocessing.Queue[int], delay_s: float, sse: bool) -> None:
    async def serve() -> None:
        Upstream.delay_s, Upstream.sse = delay_s, sse
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Upstream, "127.0.0.1", 0, backlog=1024)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


@contextmanager
def upstreams(count: int, *, delay_s: float, sse: bool) -> Iterator[list[int]]:
    """Run stand-in replicas, each in a process of its own. Yields their ports."""
    ready: multiprocessing.Queue[int] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=_serve, args=(ready, delay_s, sse), daemon=True)
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield [ready.get(timeout=10) for _ in processes]
    finally:
        for process in processes:
            process.kill()


def bodies(*, sse: bool, text: bool, count: int = 64) -> list[bytes]:
    """Request bodies with different prompts, of token ids or of text of the same length."""
    rng = random.Random(1)
    made = []
    for _ in range(count):
        ids = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS)]
        prompt: object = "".join(f"{number % 1000:03} " for number in ids) if text else ids
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "stream": sse}
        made.append(json.dumps(fields).encode())
    return made


class Client(asyncio.Protocol):
    """One connection of the load generator: a request as soon as the answer before is complete."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = bytearray()
        self.load.connected(self)

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
        head = bytes(self.buffer[:end]).lower()
        match = re.search(rb"content-length: *(\d+)", head)
        chunked = match is None and b"chunked" in head
        if not head.startswith(b"http/1.1 200") or not (match or chunked):
            self.load.failed.append(bytes(self.buffer[:500]))
            self.transport.close()
        elif (
            self.buffer.endswith(LAST)
            if match is None
            else len(self.buffer) >= (end + 4 + int(match[1]))
        ):
            now = time.perf_counter()
            self.load.took.append(now - self.begun)
            self.buffer.clear()
            wait_s = self.begun + self.load.pause_s - now
            if wait_s > 0:
                asyncio.get_running_loop().call_later(wait_s, self.send)
            else:
                self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.lost()


class Load:
    """Load on one port. All connections are open before the first request.

    Closed loop: each connection sends when it has its answer; with a rate, not before its turn.
    """

    def __init__(
        self, connections: int, seconds: float, bodies: list[bytes], rate: float | None = None
    ) -> None:
        self.connections = self.open = connections
        self.pause_s = connections / rate if rate else 0.0
        self.seconds = seconds
        self.took: list[float] = []
        self.failed: list[bytes] = []
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.requests = [head + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies]
        self.sent = 0
        self.clients: list[Client] = []

    def connected(self, client: Client) -> None:
        self.clients.append(client)

    def next(self) -> bytes:
        self.sent += 1
        return self.requests[self.sent // GROUP % len(self.requests)]

    def lost(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set_result(None)

    async def run(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        for _ in range(self.connections):
            await loop.create_connection(lambda: Client(self), "127.0.0.1", port)
        self.end = time.perf_counter() + self.seconds
        for number, client in enumerate(self.clients):
            loop.call_later(self.pause_s * number / self.connections, client.send)
        await self.done


@dataclass
class Figures:
    """One row."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    rss_mb: float


def measure(
    port: int,
    requests: list[bytes],
    *,
    connections: int,
    seconds: float,
    rate: float | None = None,
    pids: list[int] | None = None,
) -> Figures:
    """Load one port, after a short warm-up.

    Args:
        port: what to load.
        requests: bodies, sent in groups of eight.
        connections: kept busy at the same time.
        seconds: length of the measurement.
        rate: requests per second of all connections together; default: as many as they can.
        pids: processes whose CPU time and memory are added up.
    """
    uvloop.run(Load(connections, min(1.0, seconds / 4), requests, rate).run(port))
    before = sum(cpu_s(pid) for pid in pids or ())
    load = Load(connections, seconds, requests, rate)
    begun = time.perf_counter()
    uvloop.run(load.run(port))
    took = time.perf_counter() - begun
    if load.failed:
        raise SystemExit(f"{len(load.failed)} requests failed, first: {load.failed[0]!r}")
    ordered = sorted(load.took)
    return Figures(
        per_s=len(ordered) / took,
        p50_ms=statistics.median(ordered) * 1e3,
        p99_ms=ordered[int(len(ordered) * 0.99)] * 1e3,
        cpu_us=(sum(cpu_s(pid) for pid in pids or ()) - before) / len(ordered) * 1e6,
        rss_mb=sum(rss_mb(pid) for pid in pids or ()),
    )


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

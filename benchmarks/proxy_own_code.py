"""What a generation costs the proxy without network: its own code, and the parsers.

    python -m benchmarks.proxy_own_code [--requests 20000] [--sse] [--ids] [--connections 4]

Real connections, pools, router and metrics, in this process; only the transports are none: what is
written to a replica is answered at once, and what is written to a client is dropped. Prompts of 512
tokens in groups of eight, answers of 4 KB. Prints the median of ten parts, in microseconds of the
thread's own time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

import uvloop

from benchmarks.proxy_load import ANSWER, MODEL, PIECES, STREAM_HEAD, Load, bodies, framed
from bucket_lora_proxy.__main__ import GC_THRESHOLD
from bucket_lora_proxy.client_connection import ClientConnection
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.connection import Connection
from bucket_lora_proxy.origin import Origin
from bucket_lora_proxy.server import Server

PARTS = 10


class Nowhere(asyncio.Transport):
    """Takes note of what is written, and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def write(self, data: Any) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Bench:
    """A proxy between transports that go nowhere."""

    def __init__(self, load: Load, connections: int, answer: bytes) -> None:
        self.load, self.answer = load, answer
        origins = (Origin.parse("http://replica-0"), Origin.parse("http://replica-1"))
        server = Server(ProxyConfig(replicas=origins))
        server.config.load()
        loop = asyncio.get_running_loop()
        forwarder = server.deps.forwarder
        self.upstream: list[tuple[Connection, Nowhere]] = []
        for replica in server.deps.fleet.replicas:
            replica.up, replica.ready = True, frozenset({MODEL})
            for _ in range(connections):
                connection, transport = Connection(loop, replica.url), Nowhere()
                connection.connection_made(transport)
                replica.data.active.add(connection)
                replica.data.discard(connection)  # as after an exchange: it is idle
                self.upstream.append((connection, transport))
        self.clients: list[tuple[ClientConnection, Nowhere]] = []
        for _ in range(connections):
            client = ClientConnection(server.config, server.server_state, {}, forwarder)
            client.connection_made(transport := Nowhere())
            self.clients.append((client, transport))

    def one(self, number: int) -> None:
        """One request and its answer."""
        client, sent_back = self.clients[number % len(self.clients)]
        sent_back.written = 0
        client.data_received(self.load.next())
        for connection, sent_on in self.upstream:
            if sent_on.written:
                sent_on.written = 0
                connection.data_received(self.answer)
        if not sent_back.written:
            raise SystemExit("a request was not answered")


async def run(args: argparse.Namespace) -> list[float]:
    """Seconds a request, of each part."""
    answer = b"".join((STREAM_HEAD, *PIECES)) if args.sse else framed(ANSWER)
    load = Load(1, 1.0, bodies(sse=args.sse, text=not args.ids))
    bench = Bench(load, args.connections, answer)
    for number in range(args.requests // PARTS):
        bench.one(number)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    took = []
    for _ in range(PARTS):
        begun = time.thread_time()
        for number in range(args.requests // PARTS):
            bench.one(number)
        took.append((time.thread_time() - begun) / (args.requests // PARTS))
    return took


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sse", action="store_true", help="16 events instead of one JSON answer")
    parser.add_argument("--ids", action="store_true", help="prompts of token ids, not of text")
    parser.add_argument("--connections", type=int, default=4)
    args = parser.parse_args()
    took = uvloop.run(run(args))
    print(f"{statistics.median(took) * 1e6:.1f} µs a request ({min(took) * 1e6:.1f} at best)")


if __name__ == "__main__":
    main()

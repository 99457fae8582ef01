"""The least that a proxy of this kind can cost: uvloop and httptools, and nothing else.

    python benchmarks/proxy_floor.py PORT REPLICA_PORT…

Takes whole requests and answers apart with the same parser, and passes them on in turn. No routing,
no limits, no errors, no metrics, no retries: what is left is the system's calls, the loop and the
parser. The difference to it is what our own code costs.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from typing import cast

import httptools
import uvloop


class Side(asyncio.Protocol):
    """One connection of either kind."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)


class Upstream(Side):
    """A connection to a replica."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.client: Client | None = None

    def data_received(self, data: bytes) -> None:
        client = self.client
        self.parser.feed_data(data)
        if client is not None:
            client.transport.write(data)

    def on_message_complete(self) -> None:
        if self.client is not None:
            self.client.pool.append(self)
            self.client = None


class Client(Side):
    """A connection of a client."""

    def __init__(self, pools: list[deque[Upstream]], ports: list[int]) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.turn = itertools.cycle(zip(pools, ports, strict=True))
        self.parts: list[bytes] = []
        self.pool: deque[Upstream] = pools[0]

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        request, self.parts = b"".join(self.parts), []
        self.pool, port = next(self.turn)
        if self.pool:
            self.send(self.pool.pop(), request)
        else:
            loop = asyncio.get_running_loop()
            task = loop.create_task(self.connect(port, request))
            TASKS.add(task)
            task.add_done_callback(TASKS.discard)

    async def connect(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(Upstream, "127.0.0.1", port)
        self.send(upstream, request)

    def send(self, upstream: Upstream, request: bytes) -> None:
        upstream.client = self
        upstream.transport.write(request)


TASKS: set[asyncio.Task[None]] = set()


async def main() -> None:
    """Serve until killed."""
    port, *replicas = map(int, sys.argv[1:])
    pools: list[deque[Upstream]] = [deque() for _ in replicas]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Client(pools, replicas), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())

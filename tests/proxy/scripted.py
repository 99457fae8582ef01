"""A server that writes exact bytes, and a pool that talks to it.

The other end is a plain socket because no real server sends malformed, torn or surplus bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bucket_lora_proxy.upstream import Origin, Pool
from tests.proxy.wire import Received, read_request

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """A server that does what the script says for every request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Received] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while (received := await read_request(reader, number)) is not None:
                self.requests.append(received)
                await self.script(received, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def writes(*parts: bytes, close: bool = False, reset: bool = False) -> Script:
    """Write the parts, each in a segment of its own."""

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            if len(parts) > 1:
                await asyncio.sleep(0.001)
        if reset:
            linger = struct.pack("ii", 1, 0)  # closing then resets instead of ending
            connected = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        elif close:
            writer.close()

    return script


@asynccontextmanager
async def talking(script: Script, *, limit: int = 8) -> AsyncIterator[tuple[Pool, Scripted]]:
    scripted = Scripted(script)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(
        Origin.parse(f"http://127.0.0.1:{port}"),
        limit=limit,
        keep_alive_s=4.0,
        connect_timeout_s=2.0,
    )
    try:
        yield pool, scripted
    finally:
        pool.close()
        server.close()
        await asyncio.sleep(0)


async def ask(pool: Pool, body: bytes = b"", *, timeout_s: float = 5.0) -> tuple[int, bytes]:
    response = await pool.request(b"POST", b"/x", timeout_s=timeout_s, body=body)
    with response:
        return response.status, await response.read(max_bytes=64 * 1024 * 1024)

"""As much HTTP/1.1 as a stand-in needs: requests with a length in, answers of any kind out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass


@dataclass
class Received:
    """A request as it came in."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    """Number of the connection it came on."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> dict[str, object]:
        document = json.loads(self.body)
        assert isinstance(document, dict)
        return document


async def read_request(reader: asyncio.StreamReader, connection: int) -> Received | None:
    """Read one request with a Content-Length body; ``None`` at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = request_line.split(" ")
    fields = [line.partition(":") for line in lines]
    headers = [(name.lower(), value.strip()) for name, _, value in fields]
    length = int(dict(headers).get("content-length", "0"))
    body = await reader.readexactly(length)
    return Received(method, target, headers, body, connection)


async def unless_closed(reader: asyncio.StreamReader, work: Awaitable[None]) -> None:
    """Do the work, but stop it with ``ConnectionError`` if the peer closes meanwhile."""
    working = asyncio.ensure_future(work)
    closed = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({working, closed}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError("the peer closed")
        working.result()
    finally:
        for task in (working, closed):
            task.cancel()
        await asyncio.gather(working, closed, return_exceptions=True)


async def answer(
    writer: asyncio.StreamWriter,
    body: bytes,
    *,
    status: int = 200,
    content_type: str = "application/json",
) -> None:
    """Write one complete answer."""
    fields = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"HTTP/1.1 {status} X\r\n{fields}\r\n".encode() + body)
    await writer.drain()


async def answer_json(writer: asyncio.StreamWriter, document: object, *, status: int = 200) -> None:
    await answer(writer, json.dumps(document).encode(), status=status)


async def begin_stream(writer: asyncio.StreamWriter) -> None:
    """Write the head of a chunked event stream."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one chunk; an empty one ends the body."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()

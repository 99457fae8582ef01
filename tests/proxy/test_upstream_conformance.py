"""HTTP/1.1 as the upstream client understands it, against a server that writes exact bytes.

The other end is a plain socket because no real server sends malformed, torn or surplus bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from bucket_lora_proxy.connection import HIGH_WATER_BYTES, MAX_HEAD_BYTES
from bucket_lora_proxy.errors import (
    AnswerTooLarge,
    BodyCut,
    ConnectFailed,
    NoResponse,
    ProtocolFault,
    UpstreamError,
    UpstreamTimeout,
)
from bucket_lora_proxy.upstream import Origin, Pool

from tests.proxy.stand_in import Received, read_request

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"
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


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
GOOD = {
    "length": (OK + b"content-length: 5\r\n\r\nhello", b"hello"),
    "empty by length": (OK + b"content-length: 0\r\n\r\n", b""),
    "empty by chunks": (CHUNKED + b"0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "chunks": (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
    "upper case and leading zeros": (CHUNKED + b"0000A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    "chunk extension": (CHUNKED + b'5;a="b"\r\nhello\r\n0\r\n\r\n', b"hello"),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 1\r\nx-t: 2\r\n\r\n", b"hello"),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        + OK
        + b"content-length: 5\r\n\r\nhello",
        b"hello",
    ),
    "no reason phrase": (b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
    "odd case and spaces": (OK + b"CoNtEnT-LeNgTh:   5  \r\n\r\nhello", b"hello"),
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_valid_answer_is_read_whole_or_byte_by_byte_and_the_connection_kept(
    name: str,
) -> None:
    raw, body = GOOD[name]
    for script in (writes(raw), writes(*(raw[i : i + 1] for i in range(len(raw))))):
        async with talking(script) as (pool, server):
            for _ in range(2):
                status, got = await ask(pool)
                assert (status, got) == (204 if name == "no content" else 200, body)
            assert server.connections == 1


@pytest.mark.parametrize(
    "raw",
    [
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        OK + b"content-length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n",
        OK + b"content-length: 5\r\n\r\nhellojunk",
    ],
)
async def test_a_connection_that_is_not_safe_to_reuse_is_closed_after_a_good_answer(
    raw: bytes,
) -> None:
    async with talking(writes(raw)) as (pool, server):
        for _ in range(2):
            assert await ask(pool) == (200, b"hello")
        assert server.connections == 2


async def test_a_body_without_framing_ends_with_the_connection() -> None:
    async with talking(writes(OK + b"\r\nhel", b"lo", close=True)) as (pool, _):
        assert await ask(pool) == (200, b"hello")


async def test_a_body_without_framing_that_ends_in_a_reset_is_cut() -> None:
    async with talking(writes(OK + b"\r\nhel", reset=True)) as (pool, _):
        with pytest.raises(BodyCut):
            await ask(pool)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", NoResponse),
        (b"HTTP/1.1 20", BodyCut),
        (OK + b"content-length: 5\r\n\r\nhell", BodyCut),
        (CHUNKED + b"5\r\nhello\r\n", BodyCut),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", BodyCut),
        (b"HTTP/1.1 100 Continue\r\n\r\n", BodyCut),
        (b"hello\r\n\r\n", ProtocolFault),
        (b"HTTP/2 200\r\n\r\n", ProtocolFault),
        (OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", ProtocolFault),
        (OK + b"content-length: -5\r\n\r\nhello", ProtocolFault),
        (OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\n", ProtocolFault),
        (CHUNKED + b"xyz\r\nhello\r\n0\r\n\r\n", ProtocolFault),
        (CHUNKED + b"5\r\nhello\r\n0\r\ncontent-length: 9\r\n\r\n", ProtocolFault),
        (CHUNKED + b"3\r\nhello\r\n0\r\n\r\n", ProtocolFault),
        (OK + b"bad header\r\n\r\n", ProtocolFault),
        (OK + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n", ProtocolFault),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", ProtocolFault),
    ],
)
async def test_a_broken_answer_is_an_error_of_its_kind(
    raw: bytes, fault: type[UpstreamError]
) -> None:
    async with talking(writes(raw, close=True)) as (pool, server):
        for number in range(1, 3):
            with pytest.raises(fault):
                await ask(pool)
            assert server.connections == number  # never reused, and on a fresh one never repeated


async def test_an_early_answer_to_a_large_body_is_read() -> None:
    raw = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"

    done = asyncio.Event()

    async def at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await asyncio.sleep(0.2)
        writer.transport.abort()
        done.set()

    server = await asyncio.start_server(at_once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool(Origin.parse(url), limit=1, keep_alive_s=4, connect_timeout_s=2)
    assert await ask(pool, b"x" * 10_000_000) == (413, b"no")
    await done.wait()
    pool.close()
    server.close()


@pytest.mark.parametrize("size", [0, 1, HIGH_WATER_BYTES - 1, HIGH_WATER_BYTES, 8_000_000])
async def test_bodies_of_any_size_arrive_in_both_directions(size: int) -> None:
    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: %d\r\n\r\n" % len(received.body) + received.body)

    body = bytes(range(256)) * (size // 256 + 1)
    async with talking(echo) as (pool, server):
        for _ in range(2):
            assert await ask(pool, body[:size]) == (200, body[:size])
        assert server.connections == 1


async def test_a_slow_reader_holds_the_sender_back() -> None:
    sent = 0

    async def flood(received: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        for _ in range(300):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")

    async with talking(flood) as (pool, _):
        with await pool.request(b"POST", b"/x", timeout_s=5.0) as response:
            await asyncio.sleep(0.3)
            assert sent < 16 * 65536 * 10  # socket buffers and one high-water mark, not 19 MB
            size = len(await response.read(max_bytes=64 * 1024 * 1024))
            assert size == 300 * 65536


async def test_a_body_above_the_limit_is_refused_and_the_connection_closed() -> None:
    async with talking(writes(OK + b"content-length: 9\r\n\r\n123456789")) as (pool, server):
        response = await pool.request(b"POST", b"/x", timeout_s=5.0)
        with response, pytest.raises(AnswerTooLarge):
            await response.read(max_bytes=8)
        assert await ask(pool) == (200, b"123456789")
        assert server.connections <= 2


async def test_silence_ends_in_a_timeout_but_slow_progress_does_not() -> None:
    async def drip(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 5\r\n\r\n")
        for byte in b"hello":
            await asyncio.sleep(0.1)
            writer.write(bytes([byte]))

    async with talking(drip) as (pool, _):
        assert await ask(pool, timeout_s=0.3) == (200, b"hello")
        with pytest.raises(UpstreamTimeout):
            await ask(pool, timeout_s=0.05)


async def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    async def answer_then_close(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.005)
        writer.close()

    async with talking(answer_then_close) as (pool, server):
        for pause_s in (0.0, 0.003, 0.005, 0.006, 0.02) * 5:
            assert await ask(pool) == (200, b"ok")
            await asyncio.sleep(pause_s)
        assert len(server.requests) >= 25


async def test_a_reused_connection_that_dies_at_once_is_repeated_a_fresh_one_is_not() -> None:
    async def second_dies(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) in (2, 4):
            writer.transport.abort()
        else:
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(second_dies) as (pool, server):
        assert await ask(pool) == (200, b"ok")
        assert await ask(pool) == (200, b"ok")
        assert len(server.requests) == 3
        pool.drop_idle()
        with pytest.raises(NoResponse):
            await ask(pool)


async def test_idle_connections_are_reused_up_to_their_age_only() -> None:
    async with talking(writes(OK + b"content-length: 2\r\n\r\nok")) as (pool, server):
        pool._keep_alive_s = 0.05
        await ask(pool)
        await ask(pool)
        assert server.connections == 1
        await asyncio.sleep(0.1)
        await ask(pool)
        assert server.connections == 2


async def test_bytes_that_answer_no_request_never_become_an_answer() -> None:
    async def answer_twice(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        await writer.drain()
        writer.write(OK + b"content-length: 4\r\n\r\nevil")

    async with talking(answer_twice) as (pool, _):
        for _ in range(10):
            assert await ask(pool) == (200, b"ok")
            await asyncio.sleep(0.02)


async def test_the_pool_never_opens_more_connections_than_its_limit() -> None:
    async def slowly(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(slowly, limit=3) as (pool, server):
        answers = await asyncio.gather(*(ask(pool) for _ in range(30)))
        assert answers == [(200, b"ok")] * 30
        assert server.connections == 3


async def test_a_cancelled_exchange_closes_its_connection_and_frees_its_place() -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 1:
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(never, limit=1) as (pool, server):
        task = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        task.cancel()
        assert await waiting == (200, b"ok")
        assert server.connections == 2


async def test_a_port_where_nobody_listens_is_a_failed_connect() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    url = f"http://127.0.0.1:{port}"
    pool = Pool(Origin.parse(url), limit=1, keep_alive_s=4, connect_timeout_s=2)
    for _ in range(3):
        with pytest.raises(ConnectFailed, match=url):
            await ask(pool)

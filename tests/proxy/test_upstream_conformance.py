"""HTTP/1.1 answers as the upstream client understands them: valid, broken, torn, of any size."""

from __future__ import annotations

import asyncio

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_lora_proxy.connection import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Connection
from bucket_lora_proxy.errors import (
    AnswerTooLarge,
    BodyCut,
    NoResponse,
    ProtocolFault,
    UpstreamError,
)
from tests.proxy.scripted import CHUNKED, OK, ask, talking, writes
from tests.proxy.wire import Received

pytestmark = pytest.mark.anyio

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
    "not modified, with the length it would have": (
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"",
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
                code = raw.rsplit(b"HTTP/1.1 ", 1)[1][:3]
                assert (status, got) == (int(code), body)
            assert server.connections == 1


@pytest.mark.parametrize(
    "raw",
    [
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        OK + b"content-length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n",
        OK + b"content-length: 5\r\n\r\nhellojunk",
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\n\r\n\x00\x01",
    ],
)
async def test_a_connection_that_is_not_safe_to_reuse_is_closed_after_a_good_answer(
    raw: bytes,
) -> None:
    async with talking(writes(raw)) as (pool, server):
        for _ in range(2):
            assert await ask(pool) == (200, b"hello")
        assert server.connections == 2


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
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000, ProtocolFault),
        (OK + b"x: " + b"y" * 300_000, ProtocolFault),
        (CHUNKED + b"5;" + b"y" * 300_000, ProtocolFault),
        (CHUNKED + b"5\r\nhello\r\n0\r\nx: " + b"y" * 300_000, ProtocolFault),
        (b"HTTP/1.1 204 No Content\r\nx: " + b"y" * 300_000, ProtocolFault),
        (OK + b"\r\nhello", ProtocolFault),  # it may be a part only
        (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n", ProtocolFault),
        (b"HTTP/1.1 099 Odd\r\ncontent-length: 5\r\n\r\nhello", ProtocolFault),
        (b"HTTP/1.1 799 Odd\r\ncontent-length: 5\r\n\r\nhello", ProtocolFault),
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


@pytest.mark.parametrize("size", [0, 1, HIGH_WATER_BYTES - 1, HIGH_WATER_BYTES, 8_000_000])
async def test_bodies_of_any_size_arrive_in_both_directions(size: int) -> None:
    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: %d\r\n\r\n" % len(received.body) + received.body)

    body = bytes(range(256)) * (size // 256 + 1)
    async with talking(echo) as (pool, server):
        for _ in range(2):
            assert await ask(pool, body[:size]) == (200, body[:size])
        assert server.connections == 1


async def test_a_body_above_the_limit_is_refused_and_the_connection_closed() -> None:
    async with talking(writes(OK + b"content-length: 9\r\n\r\n123456789")) as (pool, server):
        response = await pool.request(b"POST", b"/x", timeout_s=5.0)
        with response, pytest.raises(AnswerTooLarge):
            await response.read(max_bytes=8)
        assert await ask(pool) == (200, b"123456789")
        assert server.connections <= 2


@given(data=st.data())
def test_what_h11_writes_is_read_the_same_however_it_is_torn(data: st.DataObject) -> None:
    """Bodies of any framing, with trailers and interim answers, in segments of any size."""
    loop = asyncio.new_event_loop()
    try:
        connection = Connection(loop, "peer")
        expected = []
        raw = b""
        for _ in range(data.draw(st.integers(1, 3))):
            sent, written = an_answer(data)
            expected.append(sent)
            raw = written
            connection._reset()
            while raw:
                size = data.draw(st.integers(1, len(raw)))
                connection.data_received(raw[:size])
                raw = raw[size:]
            got = (connection.status, connection.headers, b"".join(connection._chunks))
            assert got == expected[-1]
            assert connection.reusable
    finally:
        loop.close()


def an_answer(data: st.DataObject) -> tuple[tuple[int, list[tuple[bytes, bytes]], bytes], bytes]:
    """An answer as it should be read, and as h11 writes it."""
    writer = h11.Connection(h11.SERVER)
    writer.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    while not isinstance(writer.next_event(), h11.EndOfMessage):
        pass
    raw = b""
    for _ in range(data.draw(st.integers(0, 2))):
        raw += writer.send(h11.InformationalResponse(status_code=103, headers=[("link", "</a>")]))
    pieces = data.draw(st.lists(st.binary(max_size=40), max_size=4))
    body = b"".join(pieces)
    chunked = data.draw(st.booleans())
    framing = ("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body)))
    value = data.draw(st.text("abc xyz\t!~", max_size=20)).strip(" \t")
    status = data.draw(st.sampled_from([200, 201, 404, 429, 500]))
    response = h11.Response(status_code=status, headers=[("X-Value", value), framing])
    raw += writer.send(response)
    for piece in pieces:
        raw += writer.send(h11.Data(data=piece)) or b""
    trailers = [("x-sum", "1")] if chunked and data.draw(st.booleans()) else []
    raw += writer.send(h11.EndOfMessage(headers=trailers)) or b""
    name, framed = framing
    fields = [(b"x-value", value.encode()), (name.encode(), framed.encode())]
    return (status, fields, body), raw

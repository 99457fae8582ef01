"""HTTP/1.1 of the whole proxy: what a client sends in any valid form, and what it gets back.

The replicas are stand-ins because no real server answers 204 or 1xx to a generation on demand.
"""

from __future__ import annotations

import asyncio
import json
import re

import h11
import pytest

from tests.proxy.proxy_harness import Harness, Proxy
from tests.proxy.stand_in import Behaviour, StandIn
from tests.proxy.wire import Received

pytestmark = pytest.mark.anyio

BODY = b'{"model": "run-v1", "prompt": [1]}'
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


def writes(raw: bytes, *, close: bool = False) -> Behaviour:
    async def behave(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        if close:
            writer.close()

    return behave


async def proxy_with(harness: Harness, behaviour: Behaviour | None = None) -> tuple[Proxy, StandIn]:
    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=behaviour))
    return await harness.proxy(replica), replica


async def talk(proxy: Proxy, *parts: bytes, answers: int = 1) -> bytes:
    """Write the parts one by one; read so many answers, and what follows them at once."""
    async with proxy.client() as client:
        got = b""
        for part in parts:
            client.writer.write(part)
            await client.writer.drain()
            if len(parts) > 1:
                await asyncio.sleep(0.0005)
        while True:
            try:
                async with asyncio.timeout(0.05 if len(statuses(got)) >= answers else 10):
                    piece = await client.reader.read(65536)
            except TimeoutError:
                return got
            if not piece:
                return got
            got += piece


def statuses(got: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", got)]


REQUESTS = {
    "length": WHOLE,
    "chunks": LINE + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "chunk extensions and trailers": LINE
    + b"transfer-encoding: chunked\r\n\r\n"
    + b"".join(b'1;a="b"\r\n%c\r\n' % byte for byte in BODY)
    + b"0\r\nx-t: 1\r\n\r\n",
    "odd case and spaces": LINE + b"CONTENT-length:  %d  \r\n\r\n%s" % (len(BODY), BODY),
    "absolute target": WHOLE.replace(b"POST /", b"POST http://x/"),
    "query": WHOLE.replace(b" HTTP", b"?a=b HTTP"),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_in_any_valid_form_arrives_unchanged_whole_or_byte_by_byte(
    harness: Harness, name: str
) -> None:
    proxy, replica = await proxy_with(harness)
    raw = REQUESTS[name]
    for parts in ([raw], [raw[i : i + 1] for i in range(len(raw))]):
        assert statuses(await talk(proxy, *parts)) == [200]
        received = replica.generations.pop()
        assert (received.target, received.body) == ("/v1/completions", BODY)
        assert received.header("content-length") == str(len(BODY))
        assert received.header("transfer-encoding") is received.header("x-t") is None


async def test_pipelined_requests_are_answered_in_their_order(harness: Harness) -> None:
    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        number = int(received.json()["prompt"][0])  # type: ignore[index]
        await asyncio.sleep(0.05 if number == 0 else 0)  # the first one takes longest
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n<%d>" % number)

    proxy, _ = await proxy_with(harness, echo)
    pipeline = b"".join(
        LINE + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY.replace(b"[1]", b"[%d]" % number))
        for number in range(5)
    )
    got = await talk(proxy, pipeline + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", answers=6)
    assert re.findall(rb"<(\d)>", got) == [b"0", b"1", b"2", b"3", b"4"]
    assert statuses(got) == [200] * 6


async def test_a_client_that_asks_first_is_told_to_continue(harness: Harness) -> None:
    proxy, replica = await proxy_with(harness)
    async with proxy.client() as client:
        expect = LINE + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        client.writer.write(expect)
        async with asyncio.timeout(2):
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(BODY)
            assert b" 200 " in await client.reader.readuntil(b"\r\n\r\n")
    assert replica.generations[0].header("expect") is None


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/bucket_lora/status", "/metrics"])
async def test_head_is_get_without_a_body(harness: Harness, path: str) -> None:
    proxy, _ = await proxy_with(harness)
    ask = b"HEAD " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    got = await talk(proxy, ask + WHOLE, answers=2)
    head, _, rest = got.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"content-length: " in head
    assert rest.startswith(b"HTTP/1.1 200 ")  # of the generation: the connection is in step


async def test_head_of_a_generation_is_refused_without_a_body(harness: Harness) -> None:
    proxy, replica = await proxy_with(harness)
    got = await talk(proxy, b"HEAD /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n" + WHOLE, answers=2)
    assert statuses(got) == [405, 200]
    assert len(replica.generations) == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_passes_without_one(harness: Harness, status: int) -> None:
    proxy, replica = await proxy_with(harness, writes(b"HTTP/1.1 %d X\r\nx-a: b\r\n\r\n" % status))
    got = await talk(proxy, WHOLE + WHOLE, answers=2)
    assert statuses(got) == [status, status]
    assert got.endswith(b"\r\n\r\n")
    assert got.count(b"x-a: b") == 2
    assert status == 304 or b"content-length" not in got
    assert {received.connection for received in replica.generations} == {
        replica.generations[0].connection
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1\r\no\r\n1;x=y\r\nk\r\n0\r\nt: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close, x-hop\r\nx-hop: 1\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_the_client_sees_one_framing_whatever_the_replica_uses(
    harness: Harness, raw: bytes
) -> None:
    proxy, _ = await proxy_with(harness, writes(raw))
    got = await talk(proxy, WHOLE + WHOLE, answers=2)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert re.sub(rb"date: [^\r]*\r\n", b"", got) == head * 2


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nshort\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n",
        b"HTTP/1.1 799 Odd\r\ncontent-length: 5\r\n\r\nwhole",
    ],
)
async def test_an_answer_that_is_not_whole_becomes_an_error_and_never_a_short_answer(
    harness: Harness, raw: bytes
) -> None:
    proxy, _ = await proxy_with(harness, writes(raw, close=True))
    answer = await proxy.generate("run-v1")
    assert (answer.status, answer.error_type) == (502, "replica_failed")


async def test_bytes_after_an_answer_never_reach_the_next_client(harness: Harness) -> None:
    evil = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    proxy, _ = await proxy_with(
        harness, writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + evil)
    )
    for _ in range(20):
        assert (await proxy.generate("run-v1")).body == b"ok"


async def test_large_bodies_pass_in_both_directions(harness: Harness) -> None:
    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(received.body)
        writer.write(head + received.body)
        await writer.drain()

    proxy, _ = await proxy_with(harness, echo)
    prompt = list(range(1_000_000))
    body = json.dumps({"model": "run-v1", "prompt": prompt}).encode()
    assert len(body) > 7_000_000
    answer = await proxy.request("POST", "/v1/completions", body=body)
    assert (answer.status, len(answer.body)) == (200, len(body))
    assert answer.body == body


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'"x"', b"\xff", b'{"model": 5}', b"{}{}", b'{"x": %b}' % DEEP, DEEP],
    ids=lambda body: repr(body[:16]),
)
async def test_a_body_that_is_no_request_is_refused_and_the_connection_kept(
    harness: Harness, body: bytes
) -> None:
    proxy, replica = await proxy_with(harness)
    bad = LINE + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    assert statuses(await talk(proxy, bad + WHOLE, answers=2)) == [400, 200]
    assert len(replica.generations) == 1


async def test_a_request_that_is_not_finished_is_not_forwarded(harness: Harness) -> None:
    proxy, replica = await proxy_with(harness)
    for cut in range(len(LINE), len(WHOLE), 7):
        await talk(proxy, WHOLE[:cut], answers=0)
    assert replica.generations == []
    assert proxy.in_flight() == [0]
    assert (await proxy.generate("run-v1")).status == 200


async def test_a_connection_is_kept_unless_the_client_wants_it_closed(harness: Harness) -> None:
    proxy, _ = await proxy_with(harness)
    async with proxy.client() as client:
        for _ in range(3):
            await client.send("POST", "/v1/completions", body=BODY)
            assert (await client.answer()).status == 200
        await client.send("POST", "/v1/completions", headers={"connection": "close"}, body=BODY)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert isinstance(await client.event(), h11.ConnectionClosed)


async def test_http_1_0_gets_control_answers_and_no_generation(harness: Harness) -> None:
    proxy, replica = await proxy_with(harness)
    old = await talk(proxy, b"GET /health HTTP/1.0\r\n\r\n")
    assert (statuses(old), b"connection: close" in old) == ([200], True)
    assert statuses(await talk(proxy, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))) == [505]
    assert replica.generations == []

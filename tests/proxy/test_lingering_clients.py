"""Clients that keep a connection and do nothing useful with it, or send what has no end.

What they send is written as bytes, because no client library sends so.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

import pytest

from bucket_lora_proxy.guard import GuardedProtocol
from tests.proxy.proxy_harness import Client, Harness, until
from tests.proxy.stand_in import StandIn
from tests.proxy.wire import Received, answer, answer_json, begin_stream, chunk

pytestmark = pytest.mark.anyio

TOKEN = "client-token-0123456789"
BODY = b'{"model": "run-v1", "prompt": [1]}'
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CONTROL = b"POST /pause HTTP/1.1\r\nhost: x\r\n"
MEGABYTE = 1024 * 1024


def statuses(got: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", got)]


async def to_the_end(client: Client) -> bytes:
    """All that comes until the proxy closes."""
    got = bytearray()
    async with asyncio.timeout(10):
        try:
            while piece := await client.reader.read(MEGABYTE):
                got += piece
        except ConnectionError:  # what was still on its way is answered with a reset
            pass
    return bytes(got)


@pytest.mark.parametrize("line", [LINE, CONTROL], ids=["generation", "control"])
async def test_the_rest_of_a_refused_body_does_not_keep_a_connection_for_ever(
    harness: Harness, line: bytes
) -> None:
    proxy = await harness.proxy(await harness.replica(), tokens=(TOKEN,))
    proxy.server.config.timeout_keep_alive = cast(int, 0.4)
    async with proxy.client() as client:
        client.writer.write(line + b"content-length: 1000\r\n\r\n")
        async with asyncio.timeout(5):
            assert statuses(await client.reader.readuntil(b"\r\n\r\n")) == [401]
        for _ in range(3):
            client.writer.write(b"x")
            await asyncio.sleep(0.05)
        await to_the_end(client)


async def test_a_connection_whose_refused_body_ended_serves_on(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica(StandIn(ready={"run-v1"})), tokens=(TOKEN,))
    proxy.server.config.timeout_keep_alive = cast(int, 0.4)
    good = LINE + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (
        TOKEN.encode(),
        len(BODY),
    )
    async with proxy.client() as client:
        client.writer.write(LINE + b"content-length: 200000\r\n\r\n")
        for _ in range(2):
            client.writer.write(b"x" * 100_000)
            await asyncio.sleep(0.05)
        client.writer.write(good[:40])
        await asyncio.sleep(0.05)
        client.writer.write(good[40:] + BODY)
        assert statuses(await to_the_end(client)) == [401, 200]


@pytest.mark.parametrize("token", [TOKEN, "wrong"], ids=["accepted", "refused"])
@pytest.mark.parametrize(
    "begin",
    [b"0\r\nx-late: ", b"5;", b"1\r\nx\r\n0\r\n" + b"x-a: b\r\n" * 500 + b"x-late: "],
    ids=["trailer", "chunk extension", "trailers"],
)
async def test_what_brings_nothing_of_a_body_has_an_end(
    harness: Harness, token: str, begin: bytes
) -> None:
    proxy = await harness.proxy(await harness.replica(), tokens=(TOKEN,))
    taken = 0
    async with proxy.client() as client:
        login = b"authorization: Bearer " + token.encode() + b"\r\n"
        client.writer.write(LINE + login + b"transfer-encoding: chunked\r\n\r\n" + begin)
        while taken < 20 * MEGABYTE and not client.writer.transport.is_closing():
            client.writer.write(b"y" * 100_000)
            taken += 100_000
            await asyncio.sleep(0.001)
        assert taken < 20 * MEGABYTE
        await to_the_end(client)


async def test_a_body_in_a_great_many_small_chunks_is_taken(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica)
    body = json.dumps({"model": "run-v1", "prompt": [7] * 20_000}).encode()
    async with proxy.client() as client:
        chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in body)
        client.writer.write(LINE + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert replica.generations[0].body == body


@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["together", "apart"])
async def test_a_body_behind_an_upgrade_is_never_taken_for_a_request(
    harness: Harness, pause_s: float
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica)
    inner = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    inner += BODY
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(inner)
    async with proxy.client() as client:
        client.writer.write(LINE + upgrade)
        await asyncio.sleep(pause_s)
        client.writer.write(inner)
        assert statuses(await to_the_end(client)) == [400]
    assert replica.generations == []


async def test_a_question_with_an_upgrade_is_answered_as_if_without(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica())
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with proxy.client() as client:
        client.writer.write(ask + LINE + b"content-length: 99\r\n\r\n")  # lost with its head
        await asyncio.sleep(0.05)
        client.writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        got = await to_the_end(client)
    assert statuses(got) == [200]
    assert b"connection: close" in got


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_never_reads_gives_its_place_at_the_replica_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def flood(received: Received, writer: asyncio.StreamWriter) -> None:
        if not stream:
            await answer(writer, b"z" * 20 * MEGABYTE)
            return
        await begin_stream(writer)
        for _ in range(20):
            await chunk(writer, b"z" * MEGABYTE)

    monkeypatch.setattr(GuardedProtocol, "stall_s", 0.3)
    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=flood))
    proxy = await harness.proxy(replica)
    async with proxy.client() as client:
        cast(asyncio.Transport, client.writer.transport).pause_reading()
        client.writer.write(LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await until(lambda: len(replica.generations) == 1)
        await until(lambda: not proxy.server.server_state.connections, 5)
    assert proxy.in_flight() == [0]
    replica.behaviour = None
    assert (await proxy.generate("run-v1")).status == 200


async def test_a_client_that_reads_slowly_is_waited_for(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large(received: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b"z" * 20 * MEGABYTE)

    monkeypatch.setattr(GuardedProtocol, "stall_s", 0.5)
    proxy = await harness.proxy(await harness.replica(StandIn(ready={"run-v1"}, behaviour=large)))
    size = 0
    async with proxy.client() as client:
        client.writer.write(LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        async with asyncio.timeout(20):
            while size < 20 * MEGABYTE:
                size += len(await client.reader.readexactly(MEGABYTE))
                await asyncio.sleep(0.1)
    assert size == 20 * MEGABYTE


async def test_a_head_that_begins_with_the_request_before_has_a_time_limit_too(
    harness: Harness,
) -> None:
    async def quick(received: Received, writer: asyncio.StreamWriter) -> None:
        await answer_json(writer, {})

    proxy = await harness.proxy(await harness.replica(StandIn(ready={"run-v1"}, behaviour=quick)))
    proxy.server.config.timeout_keep_alive = cast(int, 0.3)
    whole = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    async with proxy.client() as client:
        client.writer.write(whole + LINE[:20])  # the next head begins, and never goes on
        assert statuses(await to_the_end(client)) == [200]

"""Clients that pipeline, read or write slowly, or are there when the proxy stops or fails.

What comes back is read as bytes, because no client library sends so.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from adapter_bucket.errors import UnsupportedUpstream
from bucket_lora_proxy.client_connection import check_server
from tests.proxy.proxy_harness import Client, Harness, Proxy, until
from tests.proxy.stand_in import Behaviour, StandIn
from tests.proxy.wire import Received, answer, answer_json, begin_stream, chunk

pytestmark = pytest.mark.anyio

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"model": "run-v1", "prompt": [1]}'
MEGABYTE = 1024 * 1024


@pytest.fixture(autouse=True, params=["at once", "gathered"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load, answers and requests are written at the end of a turn of the loop."""
    if request.param == "gathered":
        monkeypatch.setattr("bucket_lora_proxy.forward.FEW", -1)


def post(body: bytes = BODY) -> bytes:
    return LINE + b"content-length: %d\r\n\r\n" % len(body) + body


def statuses(got: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", got)]


def reading(client: Client) -> asyncio.Transport:
    return cast(asyncio.Transport, client.writer.transport)


async def proxy_with(
    harness: Harness, behaviour: Behaviour | None = None, **settings: Any
) -> tuple[Proxy, StandIn]:
    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=behaviour))
    return await harness.proxy(replica, **settings), replica


async def test_thousands_of_requests_sent_together_are_answered_in_turn(harness: Harness) -> None:
    proxy, replica = await proxy_with(harness)
    count = 3000  # answered inside each other they would be too deep
    async with proxy.client() as client:
        client.writer.write(post(b"{") * count + post())
        got = b""
        async with asyncio.timeout(20):
            while len(statuses(got[-400:])) == 0 or statuses(got[-400:])[-1] != 200:
                got += await client.reader.read(MEGABYTE)
    assert statuses(got) == [400] * count + [200]
    assert len(replica.generations) == 1


async def test_a_client_that_reads_nothing_is_not_answered_further(harness: Harness) -> None:
    async def large(received: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, b"x" * 4 * MEGABYTE)

    proxy, replica = await proxy_with(harness, large)
    async with proxy.client() as client:
        held = reading(client)
        held.pause_reading()
        client.writer.write(post() * 20)
        await asyncio.sleep(0.5)
        assert 1 <= len(replica.generations) <= 5  # what kernel buffers hold, and one more
        held.resume_reading()
        size = 0
        async with asyncio.timeout(20):
            while size < 20 * 4 * MEGABYTE:
                size += len(await client.reader.read(MEGABYTE))
    assert len(replica.generations) == 20


async def test_a_client_that_reads_a_stream_slowly_holds_the_replica_back(
    harness: Harness,
) -> None:
    sent = 0

    async def flood(received: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await begin_stream(writer)
        for _ in range(40):
            await chunk(writer, b"z" * MEGABYTE)
            sent += MEGABYTE
        await chunk(writer, b"")

    proxy, _ = await proxy_with(harness, flood)
    async with proxy.client() as client:
        held = reading(client)
        held.pause_reading()
        client.writer.write(post())
        await asyncio.sleep(0.5)
        assert sent < 25 * MEGABYTE
        held.resume_reading()
        got = bytearray()
        async with asyncio.timeout(20):
            while not got.endswith(b"\r\n0\r\n\r\n"):
                got += await client.reader.read(MEGABYTE)
    assert got.count(b"z") == 40 * MEGABYTE
    assert sent == 40 * MEGABYTE


async def test_the_body_of_a_request_that_had_to_wait_has_its_time_limit_too(
    harness: Harness,
) -> None:
    proxy, replica = await proxy_with(harness, body_timeout_s=0.3)
    async with proxy.client() as client:
        client.writer.write(post() + LINE + b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(3):
            got = await client.reader.read(-1)
    assert statuses(got) == [200, 408]
    assert got.count(b"connection: close") == 1
    assert len(replica.generations) == 1


async def test_a_body_may_come_in_any_number_of_pieces_within_its_limits(
    harness: Harness,
) -> None:
    proxy, replica = await proxy_with(harness, max_body_bytes=300_000)
    body = json.dumps({"model": "run-v1", "prompt": [7] * 90_000}).encode()
    assert 250_000 < len(body) < 300_000
    async with proxy.client() as client:
        for start in range(0, len(post(body)), 10_000):
            client.writer.write(post(body)[start : start + 10_000])
            await client.writer.drain()
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            assert statuses(await client.reader.readuntil(b"\r\n\r\n")) == [200]
    assert replica.generations[0].body == body
    async with proxy.client() as client:
        client.writer.write(LINE + b"transfer-encoding: chunked\r\n\r\n")
        client.writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        client.writer.write(b"40000\r\n" + b"x" * 262144 + b"\r\n")
        async with asyncio.timeout(5):
            assert statuses(await client.reader.readuntil(b"\r\n\r\n")) == [413]


@pytest.mark.parametrize("shutdown_s", [0.9, 2.0])
async def test_what_is_in_flight_is_finished_before_the_proxy_stops(
    harness: Harness, shutdown_s: float
) -> None:
    async def slow(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await answer_json(writer, {"done": True})

    proxy, _ = await proxy_with(harness, slow, shutdown_s=shutdown_s)
    asked = asyncio.create_task(proxy.generate("run-v1"))
    await until(lambda: proxy.in_flight() == [1])
    proxy.server.should_exit = True
    got = await asked
    assert (got.status, got.json(), got.header("connection")) == (200, {"done": True}, "close")


async def test_what_does_not_end_in_time_is_told_that_the_proxy_stops(harness: Harness) -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        if b"stream" in received.body:
            await begin_stream(writer)
            await chunk(writer, b"data: 1\n\n")
        await asyncio.sleep(60)

    proxy, replica = await proxy_with(harness, never, shutdown_s=1.0)
    waiting = asyncio.create_task(proxy.generate("run-v1"))
    async with proxy.client() as client:
        client.writer.write(post(b'{"model": "run-v1", "stream": true}'))
        await until(lambda: proxy.in_flight() == [2])
        proxy.server.should_exit = True
        async with asyncio.timeout(5):
            got = await client.reader.read(-1)
    assert got.endswith(b"data: 1\n\n\r\n")  # and not the final chunk
    refused = await waiting
    assert (refused.status, refused.json()["error"]["retryable"]) == (503, True)
    assert "stopping" in refused.json()["error"]["message"]
    await until(lambda: replica.cancelled == 2)
    assert proxy.in_flight() == [0]


async def test_a_fault_of_the_proxy_is_an_error_for_one_request_and_not_a_silence(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ZeroDivisionError

    proxy, _ = await proxy_with(harness)
    async with proxy.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(proxy.deps.router, "pick", broken)
            await client.send("POST", "/v1/completions", body=BODY)
            failed = await client.answer()
        await client.send("POST", "/v1/completions", body=BODY)
        assert (await client.answer()).status == 200
    assert (failed.status, failed.error_type) == (500, "internal")
    assert "ZeroDivisionError" in caplog.text
    assert proxy.deps.forwarder.running == set()


async def test_an_answer_goes_out_before_the_refusal_of_what_came_behind_it(
    harness: Harness,
) -> None:
    proxy, _ = await proxy_with(harness)
    async with proxy.client() as client, asyncio.timeout(10):
        client.writer.write(post() + b"no request\r\n\r\n")
        got = await client.reader.read()
    assert statuses(got)[-1] == 400
    assert statuses(got) in ([200, 400], [400])  # a refusal may be sooner than the replica


async def test_pipelining_clients_all_get_their_own_answers_in_order(harness: Harness) -> None:
    async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
        await answer_json(writer, {"prompt": received.json()["prompt"]})

    proxy, _ = await proxy_with(harness, echo)

    async def one(number: int) -> list[int]:
        prompts = [[number, turn] for turn in range(10)]
        asked = [json.dumps({"model": "run-v1", "prompt": prompt}).encode() for prompt in prompts]
        async with proxy.client() as client:
            client.writer.write(b"".join(map(post, asked)))
            got = b""
            while len(re.findall(rb"\]\}", got)) < len(asked):
                got += await client.reader.read(MEGABYTE)
        assert statuses(got) == [200] * len(asked)
        said = [json.loads(b"[%b]" % ids) for ids in re.findall(rb"\[([^\]]*)\]", got)]
        assert said == prompts
        return [ids[0] for ids in said]

    async with asyncio.timeout(20):
        await asyncio.gather(*(one(number) for number in range(20)))


async def test_an_idle_connection_is_closed_and_a_used_one_is_not(harness: Harness) -> None:
    async def slow(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.2)
        await answer_json(writer, {})

    proxy, _ = await proxy_with(harness, slow)
    proxy.server.config.timeout_keep_alive = cast(int, 1.0)
    async with proxy.client() as client, asyncio.timeout(10):
        for _ in range(2):  # longer than an idle time may be
            await client.send("POST", "/v1/completions", body=BODY)
            assert (await client.answer()).status == 200
        await asyncio.sleep(0.3)
        begun = asyncio.get_running_loop().time()
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200
        assert await client.reader.read() == b""
        assert 0.8 < asyncio.get_running_loop().time() - begun < 5


@pytest.mark.parametrize(
    "target", [b"/v1/completions?x=1", b"/v1/%63ompletions", b"http://x/v1/completions"]
)
async def test_a_generation_may_be_asked_for_in_other_ways(harness: Harness, target: bytes) -> None:
    proxy, replica = await proxy_with(harness)
    async with proxy.client() as client, asyncio.timeout(10):
        client.writer.write(post().replace(b"/v1/completions", target))
        assert (await client.answer()).status == 200
    assert [received.target for received in replica.generations] == ["/v1/completions"]


def test_a_uvicorn_that_begins_requests_in_another_way_is_refused() -> None:
    check_server(HttpToolsProtocol)
    with pytest.raises(UnsupportedUpstream, match="begins requests"):
        check_server(asyncio.Protocol)

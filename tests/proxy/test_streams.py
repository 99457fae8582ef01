"""Streamed answers: piece by piece, and never cut without the client seeing it."""

from __future__ import annotations

import asyncio

import h11
import pytest

from tests.proxy.proxy_harness import Harness, Proxy
from tests.proxy.stand_in import StandIn
from tests.proxy.wire import Received, begin_stream, chunk

pytestmark = pytest.mark.anyio


async def stream_of(proxy: Proxy, model: str = "run-v1") -> bytes:
    answer = await proxy.generate(model, stream=True)
    return answer.body


async def test_a_stream_passes_piece_by_piece(harness: Harness) -> None:
    step = asyncio.Event()

    async def stream(received: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        for piece in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
            await chunk(writer, piece)
            await step.wait()
            step.clear()
        await chunk(writer, b"")

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=stream))
    proxy = await harness.proxy(replica)
    async with proxy.client() as client:
        body = b'{"model": "run-v1", "stream": true}'
        await client.send("POST", "/v1/completions", body=body)
        head = await client.event()
        assert (b"content-type", b"text/event-stream; charset=utf-8") in head.headers
        for piece in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
            assert bytes((await client.event()).data) == piece  # before the next one is written
            step.set()
        assert isinstance(await client.event(), h11.EndOfMessage)


async def test_a_stream_that_fails_before_its_first_piece_goes_to_another_replica(
    harness: Harness,
) -> None:
    async def dies(received: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def works(received: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")

    bad, good = await harness.replicas(2, "run-v1")
    bad.behaviour, good.behaviour = dies, works
    proxy = await harness.proxy(bad, good)
    assert {await stream_of(proxy) for _ in range(4)} == {b"data: [DONE]\n\n"}
    assert bad.generations


@pytest.mark.parametrize("ending", ["reset", "close", "garbage"])
async def test_a_stream_that_fails_later_ends_as_an_aborted_connection(
    harness: Harness, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def dies(received: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, b"data: 1\n\n")
        await asyncio.sleep(0.05)
        if ending == "garbage":
            writer.write(b"zzz\r\n")
            await writer.drain()
        elif ending == "close":
            writer.close()
        else:
            writer.transport.abort()

    replicas = await harness.replicas(2, "run-v1")
    for replica in replicas:
        replica.behaviour = dies
    proxy = await harness.proxy(*replicas)
    with pytest.raises(h11.RemoteProtocolError, match="incomplete"):
        await stream_of(proxy)
    assert sum(len(replica.generations) for replica in replicas) == 1
    assert proxy.in_flight() == [0, 0]
    assert [record.levelname for record in caplog.records if "aborted" in record.message] == [
        "WARNING"
    ]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

"""Replicas that fail in every way at once, under load: nothing lost, nothing under another name.

Stand-ins, because the faults must be frequent; the bounded number of requests keeps it short.
"""

from __future__ import annotations

import asyncio
import json
import random

import h11
import pytest

from tests.proxy.proxy_harness import Harness, Proxy, until
from tests.proxy.stand_in import Behaviour, StandIn
from tests.proxy.wire import Received, answer_json, begin_stream, chunk

pytestmark = pytest.mark.anyio

VERSIONS = ("run-v1", "run-v2", "run-v3")
REQUESTS = 1500
IN_FLIGHT = 32
RETRIES = 30
"""As many as stock TRL makes."""


def unreliable(replica: StandIn, rng: random.Random) -> Behaviour:
    """Answers with its own truth: the version it was asked for, or 404 if it does not have it."""

    async def behave(received: Received, writer: asyncio.StreamWriter) -> None:
        asked = received.json()
        model, stream = asked["model"], asked.get("stream", False)
        if model not in replica.ready:
            message = f"The model `{model}` does not exist."
            await answer_json(writer, {"error": {"message": message}}, status=404)
            return
        fate = rng.random()
        text = json.dumps({"served": model, "number": asked["number"]}).encode()
        await asyncio.sleep(rng.random() * 0.01)
        if fate < 0.02:
            writer.transport.abort()
        elif fate < 0.04:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + text)
            await writer.drain()
            writer.transport.abort()
        elif fate < 0.06:
            await answer_json(writer, {"error": "no"}, status=rng.choice([429, 500, 503]))
        elif fate < 0.07:
            writer.write(b"garbage\r\n\r\n")
            await writer.drain()
        elif fate < 0.08:
            await asyncio.sleep(0.3)
            await answer_json(writer, json.loads(text))
        elif stream:
            await begin_stream(writer)
            await chunk(writer, text[:10])
            if fate < 0.12:
                writer.transport.abort()
                return
            await chunk(writer, text[10:])
            await chunk(writer, b"")
        else:
            await answer_json(writer, json.loads(text))

    return behave


async def generate(proxy: Proxy, number: int, rng: random.Random) -> tuple[str, int, object]:
    """Ask like a rollout worker: again while the error says that it can help."""
    model = rng.choice(VERSIONS)
    last: object = None
    for attempt in range(1, RETRIES):
        try:
            answer = await proxy.generate(
                model, prompt=[number // 8] * 64, number=number, stream=number % 3 == 0
            )
        except h11.RemoteProtocolError as error:  # an aborted stream
            last = error
        else:
            if answer.status == 200:
                return model, attempt, answer.json()
            last = answer.body
        await asyncio.sleep(0.02)
    return model, RETRIES, last


async def test_every_request_is_answered_by_its_own_version_whatever_fails(
    harness: Harness,
) -> None:
    rng = random.Random(7)
    replicas = await harness.replicas(3, *VERSIONS)
    for replica in replicas:
        replica.behaviour = unreliable(replica, rng)
    proxy = await harness.proxy(*replicas)
    numbers = iter(range(REQUESTS))
    attempts = 0

    async def worker() -> None:
        nonlocal attempts
        for number in numbers:
            model, tries, answer = await generate(proxy, number, rng)
            assert answer == {"served": model, "number": number}
            attempts += tries

    async def killer() -> None:
        while True:
            await asyncio.sleep(0.4)
            victim = rng.choice(replicas)
            await victim.stop()
            victim.ready = set()
            await asyncio.sleep(0.2)
            await victim.start()
            for version in VERSIONS:
                await asyncio.sleep(0.05)
                victim.make_ready(version)

    killing = asyncio.create_task(killer())
    try:
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    assert attempts < REQUESTS * 1.2  # most faults never reach the client
    await until(lambda: proxy.in_flight() == [0, 0, 0])
    assert proxy.outstanding() == [0, 0, 0]
    assert proxy.deps.watcher.awaited() == []

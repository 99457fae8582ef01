"""A replica process that fails in every way, often. Started by ``proxy_run.py``.

    python -m tests.faults.faulty_replica PORT SEED

A stand-in, because a real server does not reset, garble or delay one answer in ten on demand. It
starts without any version, as a restarted replica does, and gets them one by one. It answers with
its own truth: the version it was asked for, or 404 if it does not have it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from tests.proxy.stand_in import Behaviour, StandIn
from tests.proxy.wire import Received, answer_json, begin_stream, chunk

VERSIONS = ("run-v1", "run-v2", "run-v3")
LOAD_S = 0.15
"""Time between two versions of a replica that has just started."""
SLOW_S = 2.0


def unreliable(replica: StandIn, rng: random.Random) -> Behaviour:
    """One request in eight meets a fault."""

    async def behave(received: Received, writer: asyncio.StreamWriter) -> None:
        asked = received.json()
        model, stream = asked["model"], bool(asked.get("stream"))
        if model not in replica.ready:
            message = f"The model `{model}` does not exist."
            await answer_json(writer, {"error": {"message": message}}, status=404)
            return
        served = {"served": model, "number": asked["number"], "pad": "x" * 2000}
        text = json.dumps(served).encode()
        fate = rng.random()
        await asyncio.sleep(rng.random() * 0.02)
        if fate < 0.02:
            writer.transport.abort()
        elif fate < 0.04:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text[:900])
            await writer.drain()
            writer.transport.abort()
        elif fate < 0.06:
            await answer_json(writer, {"error": "no"}, status=rng.choice([429, 500]))
        elif fate < 0.07:
            writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
            await writer.drain()
        elif fate < 0.08:
            surplus = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text)
            writer.write(head + text + surplus)
        else:
            if fate < 0.083:
                await asyncio.sleep(SLOW_S)
            await deliver(writer, text, stream=stream, cut=0.083 < fate < 0.125)

    return behave


async def deliver(writer: asyncio.StreamWriter, text: bytes, *, stream: bool, cut: bool) -> None:
    """Answer well, or, if it is a stream that is to be cut, half."""
    if not stream:
        await answer_json(writer, json.loads(text))
        return
    await begin_stream(writer)
    for start in range(0, len(text), 500):
        if cut and start:
            writer.transport.abort()
            return
        await chunk(writer, text[start : start + 500])
    await chunk(writer, b"")


async def main() -> None:
    """Serve until killed."""
    replica = StandIn(port=int(sys.argv[1]))
    replica.behaviour = unreliable(replica, random.Random(int(sys.argv[2])))
    await replica.start()
    for version in VERSIONS:
        await asyncio.sleep(LOAD_S)
        replica.make_ready(version)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

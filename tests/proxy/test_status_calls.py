"""What the proxy asks replicas for itself: always with an end, of the process that is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from bucket_lora_proxy.errors import UpstreamTimeout
from tests.proxy.proxy_harness import Harness
from tests.proxy.scripted import OK, talking, writes
from tests.proxy.stand_in import StandIn
from tests.proxy.wire import Received

pytestmark = pytest.mark.anyio


async def drip(writer: asyncio.StreamWriter) -> None:
    """An answer that always goes on and has no end."""
    writer.write(OK + b"content-length: 1000000\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b" ")
        await asyncio.sleep(0.05)
    raise ConnectionResetError("the peer closed")


@dataclass
class Dripping(StandIn):
    """A replica whose status, once told to, comes drop by drop."""

    drips: bool = False

    async def _status(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.drips:
            await drip(writer)
        await super()._status(received, reader, writer)


async def test_a_replica_whose_status_never_ends_is_not_used_on_what_it_said_before(
    harness: Harness,
) -> None:
    wedged, good = Dripping(ready={"run-v1"}), StandIn(ready={"run-v1"})
    for replica in (wedged, good):
        await harness.replica(replica)
    proxy = await harness.proxy(wedged, good, control_timeout_s=1.0)
    wedged.drips = True
    await proxy.until_up(1)
    assert (await proxy.generate("run-v1")).json()["served_by"] == good.port
    unhealthy = (await proxy.get("/health")).json()["unhealthy"]
    assert "no whole answer within 1 s" in unhealthy[wedged.url]
    wedged.drips = False
    await proxy.until_up(2)


async def test_the_limit_of_a_call_covers_its_place_its_head_and_its_body() -> None:
    async def slow(received: Received, writer: asyncio.StreamWriter) -> None:
        await drip(writer)

    async with talking(slow, limit=1) as (pool, server):

        async def fetch(timeout_s: float) -> None:
            await pool.fetch(b"GET", b"/x", timeout_s=timeout_s, max_bytes=1000)

        begun = asyncio.get_running_loop().time()
        # The second waits for the first one's place, which is not free before its limit is over.
        for failed in await asyncio.gather(fetch(1.0), fetch(0.3), return_exceptions=True):
            assert isinstance(failed, UpstreamTimeout)
        assert asyncio.get_running_loop().time() - begun < 3
        assert len(server.requests) == 1
        server.script = writes(OK + b"content-length: 2\r\n\r\nok")
        assert await pool.fetch(b"GET", b"/x", timeout_s=5, max_bytes=1000) == (200, b"ok")


async def test_another_process_at_the_same_address_is_asked_for_its_base_model(
    harness: Harness,
) -> None:
    replica = await harness.replica(StandIn(base_model="old", replica_id="first"))
    proxy = await harness.proxy(replica)
    assert (await proxy.generate("old")).status == 200
    replica.base_model, replica.replica_id = "new", "second"  # and no call failed meanwhile
    fleet = proxy.deps.fleet
    assert await fleet.changed_until(lambda: bool(fleet.serving("new")), 5)
    assert (await proxy.generate("new")).status == 200
    old = await proxy.generate("old")
    assert (old.status, old.error_type) == (404, "model_not_found")

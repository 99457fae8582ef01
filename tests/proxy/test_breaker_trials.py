"""What counts as a failure of a replica, and how many requests try one that kept failing."""

from __future__ import annotations

import asyncio

import pytest

from bucket_lora_proxy.breaker import FAILURES, OPEN_S
from tests.proxy.proxy_harness import Harness, until
from tests.proxy.stand_in import StandIn
from tests.proxy.wire import Received, answer_json

pytestmark = pytest.mark.anyio


async def test_only_one_request_at_a_time_tries_a_replica_that_kept_failing(
    harness: Harness,
) -> None:
    early_ends, trial_ends = asyncio.Event(), asyncio.Event()

    async def failing(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(bad.generations) == 1:
            await early_ends.wait()
            await answer_json(writer, {"error": "prompt too long"}, status=400)
        elif len(bad.generations) <= 1 + FAILURES:
            await answer_json(writer, {"error": "broken"}, status=500)
        else:
            await trial_ends.wait()
            await answer_json(writer, {"served_by": "trial"})

    bad, good = await harness.replicas(2, "run-v1")
    bad.behaviour = failing
    proxy = await harness.proxy(bad, good)
    fleet = proxy.deps.fleet
    of_bad, of_good = fleet.replicas
    of_good.draining = True
    early = asyncio.create_task(proxy.generate("run-v1"))
    await until(lambda: len(bad.generations) == 1)
    for _ in range(FAILURES):
        assert (await proxy.generate("run-v1")).status == 500
    of_good.draining = False
    assert fleet.serving("run-v1") == [of_good]
    await asyncio.sleep(OPEN_S)
    assert fleet.serving("run-v1") == [of_bad, of_good]
    asked = [asyncio.create_task(proxy.generate("run-v1", prompt=[i])) for i in range(8)]
    await until(lambda: len(bad.generations) == FAILURES + 2)
    early_ends.set()
    assert (await early).status == 400
    assert fleet.serving("run-v1") == [of_good]
    trial_ends.set()
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    assert len(bad.generations) == FAILURES + 2
    assert fleet.serving("run-v1") == [of_bad, of_good]


@pytest.mark.parametrize("status", [500, 504])
async def test_an_error_whose_body_is_cut_is_one_failure(harness: Harness, status: int) -> None:
    async def cut_error(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 100\r\n\r\n{" % status)
        await writer.drain()
        await asyncio.sleep(0.02)  # the head is seen before the end
        writer.close()

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=cut_error))
    proxy = await harness.proxy(replica, max_attempts=1)
    breaker = proxy.deps.fleet.replicas[0].breaker
    for _ in range(FAILURES - 1):
        assert (await proxy.generate("run-v1")).status == 502
        await proxy.until_up(1)
    assert len(replica.generations) == FAILURES - 1
    assert breaker.closed
    assert (await proxy.generate("run-v1")).status == 502
    assert not breaker.closed

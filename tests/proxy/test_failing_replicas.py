"""Replicas that fail: what is retried, what is not, and what the client sees.

The replicas are stand-ins because a real server does not reset or garble a connection on demand.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.proxy_harness import ANSWER_S, Harness, until
from tests.proxy.stand_in import Behaviour, StandIn
from tests.proxy.wire import Received, answer_json, begin_stream, chunk

pytestmark = pytest.mark.anyio


async def reset(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def cut_body(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


async def cut_chunk(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel")
    await writer.drain()
    writer.close()


async def garbage(received: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    await writer.drain()


async def status_500(received: Received, writer: asyncio.StreamWriter) -> None:
    await answer_json(writer, {"error": "broken"}, status=500)


async def status_429(received: Received, writer: asyncio.StreamWriter) -> None:
    await answer_json(writer, {"error": "busy"}, status=429)


FAULTS = [reset, cut_body, cut_chunk, garbage, status_500, status_429]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_generation_lost_on_one_replica_is_answered_by_another(
    harness: Harness, fault: Behaviour
) -> None:
    bad, good = await harness.replicas(2, "run-v1")
    bad.behaviour = fault
    proxy = await harness.proxy(bad, good)
    answers = await asyncio.gather(*(proxy.generate("run-v1") for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.json()["served_by"] for answer in answers} == {good.port}
    assert bad.generations
    assert proxy.in_flight() == [0, 0]


@pytest.mark.parametrize("fault", FAULTS)
async def test_attempts_are_bounded_and_the_end_is_an_error_not_a_wrong_answer(
    harness: Harness, fault: Behaviour
) -> None:
    replicas = await harness.replicas(3, "run-v1")
    for replica in replicas:
        replica.behaviour = fault
    proxy = await harness.proxy(*replicas, max_attempts=2)
    answer = await proxy.generate("run-v1")
    assert answer.status in (429, 500, 502)
    assert sum(len(replica.generations) for replica in replicas) == 2
    assert proxy.in_flight() == [0, 0, 0]


async def test_a_client_error_is_passed_on_and_not_retried(harness: Harness) -> None:
    async def status_400(received: Received, writer: asyncio.StreamWriter) -> None:
        await answer_json(writer, {"error": "prompt too long"}, status=400)

    replicas = await harness.replicas(2, "run-v1")
    for replica in replicas:
        replica.behaviour = status_400
    proxy = await harness.proxy(*replicas)
    answer = await proxy.generate("run-v1")
    assert (answer.status, answer.json()) == (400, {"error": "prompt too long"})
    assert sum(len(replica.generations) for replica in replicas) == 1


async def test_a_killed_replica_leaves_at_once_and_is_back_when_its_status_answers(
    harness: Harness,
) -> None:
    first, second = await harness.replicas(2, "run-v1")
    proxy = await harness.proxy(first, second, poll_s=0.05)
    await first.stop()
    for _ in range(6):
        assert (await proxy.generate("run-v1")).json()["served_by"] == second.port
    await proxy.until_up(1)
    first.ready = set()  # restarted empty
    await first.start()
    await proxy.until_up(2)
    for _ in range(6):
        assert (await proxy.generate("run-v1")).json()["served_by"] == second.port
    first.make_ready("run-v1")
    async with asyncio.timeout(ANSWER_S):
        while (await proxy.generate("run-v1")).json()["served_by"] != first.port:
            pass


async def test_an_unhealthy_replica_is_not_used_although_its_status_answers(
    harness: Harness,
) -> None:
    sick, well = await harness.replicas(2, "run-v1")
    sick.healthy = False
    proxy = await harness.proxy(sick, well)
    for _ in range(4):
        assert (await proxy.generate("run-v1")).json()["served_by"] == well.port
    sick.healthy = True
    await proxy.until_up(2)


async def test_a_stopped_replica_gives_up_its_unanswered_requests(harness: Harness) -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    hung, good = await harness.replicas(2, "run-v1")
    hung.behaviour = never
    proxy = await harness.proxy(hung, good, unresponsive_s=1.0, control_timeout_s=1.0)
    requests = [asyncio.create_task(proxy.generate("run-v1")) for _ in range(4)]
    await asyncio.sleep(0.1)
    hung.frozen = True
    answers = await asyncio.gather(*requests)
    assert {answer.json()["served_by"] for answer in answers} == {good.port}


async def test_silence_inside_a_generation_ends_in_504_and_is_not_run_again(
    harness: Harness,
) -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    replicas = await harness.replicas(2, "run-v1")
    for replica in replicas:
        replica.behaviour = never
    proxy = await harness.proxy(*replicas, response_timeout_s=0.2)
    answer = await proxy.generate("run-v1")
    assert (answer.status, answer.error_type) == (504, "replica_timeout")
    assert sum(len(replica.generations) for replica in replicas) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request_upstream(
    harness: Harness, stream: bool
) -> None:
    async def endless(received: Received, writer: asyncio.StreamWriter) -> None:
        if stream:
            await begin_stream(writer)
        while True:
            if stream:
                await chunk(writer, b"data: x\n\n")
            await asyncio.sleep(0.02)

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=endless))
    proxy = await harness.proxy(replica)
    async with proxy.client() as client:
        await client.send("POST", "/v1/completions", body=b'{"model": "run-v1"}')
        if stream:
            await client.event()
        await until(lambda: proxy.in_flight() == [1])
    await until(lambda: replica.cancelled == 1)
    assert proxy.in_flight() == [0]


async def test_a_client_that_leaves_while_its_adapter_is_awaited_leaves_nothing_behind(
    harness: Harness,
) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, adapter_wait_s=60.0)
    async with proxy.client() as client:
        await client.send("POST", "/v1/completions", body=b'{"model": "run-v1"}')
        await until(lambda: proxy.deps.watcher.awaited() == ["run-v1"])
    await until(lambda: proxy.deps.watcher.awaited() == [])


async def test_a_connection_that_the_replica_closed_while_idle_is_not_noticed_by_the_client(
    harness: Harness,
) -> None:
    async def answer_then_close(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=answer_then_close))
    proxy = await harness.proxy(replica)
    for pause_s in (0.0, 0.005, 0.01, 0.012, 0.02) * 6:
        assert (await proxy.generate("run-v1")).status == 200
        await asyncio.sleep(pause_s)


async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new(
    harness: Harness,
) -> None:
    release = asyncio.Event()

    async def hold(received: Received, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await answer_json(writer, {"served_by": "drained"})

    leaving, staying = await harness.replicas(2, "run-v1")
    leaving.behaviour = hold
    proxy = await harness.proxy(leaving, staying)
    requests = [asyncio.create_task(proxy.generate("run-v1", prompt=[i])) for i in range(6)]
    await until(lambda: len(leaving.generations) + len(staying.generations) == 6)
    held = len(leaving.generations)
    answer = await proxy.request("POST", f"/proxy/drain?replica={leaving.url}")
    assert answer.json() == {"replica": leaving.url, "draining": True, "in_flight": held}
    for number in range(6):
        answer = await proxy.generate("run-v1", prompt=[100 + number])
        assert answer.json()["served_by"] == staying.port
    unhealthy = (await proxy.get("/health")).json()["unhealthy"]
    assert unhealthy == {leaving.url: "it is being drained"}
    release.set()
    assert {answer.status for answer in await asyncio.gather(*requests)} == {200}
    answer = await proxy.request("POST", f"/proxy/undrain?replica={leaving.url}/")
    assert answer.json()["draining"] is False
    await proxy.until_up(2)
    assert (await proxy.get("/proxy/drain")).status == 405


@pytest.mark.parametrize("fault", [cut_body, status_500])
async def test_a_replica_whose_generations_keep_failing_is_left_alone_and_tried_again(
    harness: Harness, fault: Behaviour
) -> None:
    bad, good = await harness.replicas(2, "run-v1")
    bad.behaviour = fault
    proxy = await harness.proxy(bad, good)
    for number in range(100):
        assert (await proxy.generate("run-v1", prompt=[number])).status == 200
    assert 5 <= len(bad.generations) <= 7  # it opens at 5; a trial may fall into this test
    page = (await proxy.get("/metrics")).body.decode()
    assert f'bucket_lora_proxy_breaker_open{{replica="{bad.url}"}} 1.0' in page
    bad.behaviour = None
    await asyncio.sleep(2.1)
    for number in range(100, 120):
        assert (await proxy.generate("run-v1", prompt=[number])).status == 200
    assert len(bad.generations) > 8


async def test_an_open_breaker_is_no_outage_where_there_is_no_other_replica(
    harness: Harness,
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=status_500))
    proxy = await harness.proxy(replica)
    for _ in range(6):
        assert (await proxy.generate("run-v1")).status == 500
    replica.behaviour = None
    assert (await proxy.generate("run-v1")).status == 200


async def test_what_the_others_retired_is_waited_for_where_the_one_that_has_it_lost_a_connection(
    harness: Harness,
) -> None:
    async def reset_the_first(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(old.generations) == 1:
            writer.transport.abort()
        else:
            await answer_json(writer, {"served_by": "old"})

    old = await harness.replica(StandIn(ready={"run-v1"}, behaviour=reset_the_first))
    new = await harness.replica(StandIn(ready={"run-v9"}))
    proxy = await harness.proxy(old, new)
    answer = await proxy.generate("run-v1")
    assert (answer.status, answer.json()) == (200, {"served_by": "old"})
    await old.stop()
    for _ in range(2):  # it is gone for good, and now the others decide
        gone = await proxy.generate("run-v1")
        assert (gone.status, gone.error_type) == (410, "adapter_retired")

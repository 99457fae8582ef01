"""Calls of a stock TRL trainer, passed on to all replicas.

The replicas are stand-ins that answer as vLLM does, because a real one cannot be made to fail one
call, or to see a file late.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.proxy.proxy_harness import Answer, Harness, Proxy, until
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio


async def call(proxy: Proxy, path: str, **fields: object) -> Answer:
    body = json.dumps(fields).encode() if fields else b""
    return await proxy.request("POST", path, body=body)


async def load(proxy: Proxy, name: str, path: str = "/adapters/1") -> Answer:
    return await call(proxy, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


async def stock_fleet(
    harness: Harness, count: int = 3, **settings: Any
) -> tuple[Proxy, list[StandIn]]:
    replicas = [await harness.replica(StandIn(plugin=False)) for _ in range(count)]
    return await harness.proxy(*replicas, allow_broadcast=True, **settings), replicas


async def test_a_sync_of_stock_trl_reaches_every_replica(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, poll_s=30.0)
    assert (await call(proxy, "/pause?mode=keep")).status == 200
    assert [replica.paused for replica in replicas] == [True] * 3
    assert replicas[0].pushed[0].target == "/pause?mode=keep"
    assert (await load(proxy, "policy-v1")).status == 200
    assert (await call(proxy, "/resume")).status == 200
    assert [replica.paused for replica in replicas] == [False] * 3
    answers = [await proxy.generate("policy-v1", prompt=[i]) for i in range(6)]  # at once
    assert {answer.status for answer in answers} == {200}
    assert (await load(proxy, "policy-v2")).status == 200
    unloaded = await call(proxy, "/v1/unload_lora_adapter", lora_name="policy-v1")
    assert unloaded.status == 200
    assert [replica.ready for replica in replicas] == [{"policy-v2"}] * 3
    assert (await call(proxy, "/reset_prefix_cache")).status == 200


async def test_a_load_that_fails_on_one_replica_is_taken_back_on_all(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness)
    replicas[1].push_fails["/v1/load_lora_adapter"] = 400
    answer = await load(proxy, "policy-v1")
    assert (answer.status, answer.error_type) == (400, "broadcast_failed")
    assert replicas[1].url in answer.json()["error"]["message"]
    assert [replica.ready for replica in replicas] == [set()] * 3
    del replicas[1].push_fails["/v1/load_lora_adapter"]
    assert (await load(proxy, "policy-v1")).status == 200
    assert [replica.ready for replica in replicas] == [{"policy-v1"}] * 3


@pytest.mark.parametrize("refused", [True, False])
async def test_a_load_whose_answer_is_lost_is_taken_back_with_the_others(
    harness: Harness, refused: bool
) -> None:
    proxy, replicas = await stock_fleet(harness, 2 if refused else 1)
    replicas[0].loses_answers = True
    if refused:
        replicas[1].push_fails["/v1/load_lora_adapter"] = 400
    answer = await load(proxy, "policy-v1")
    assert answer.status == (400 if refused else 503)
    assert replicas[0].ready == set()
    assert len([seen for seen in replicas[0].pushed if "/v1/load" in seen.target]) == 1
    replicas[0].loses_answers = False
    replicas[-1].push_fails.clear()
    await proxy.until_up(len(replicas))
    assert (await load(proxy, "policy-v1")).status == 200


async def test_a_mount_that_lags_is_asked_again_until_it_catches_up(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, 2)
    replicas[1].mounted = set()
    loading = asyncio.create_task(load(proxy, "policy-v1", "/adapters/1"))
    await until(lambda: len(replicas[1].pushed) > 1)
    replicas[1].mounted.add("/adapters/1")
    assert (await loading).status == 200
    assert [replica.ready for replica in replicas] == [{"policy-v1"}] * 2


async def test_a_mount_that_never_catches_up_is_504_and_nothing_stays_loaded(
    harness: Harness,
) -> None:
    proxy, replicas = await stock_fleet(harness, 2, broadcast_wait_s=0.7)
    replicas[1].mounted = set()
    answer = await load(proxy, "policy-v1")
    assert (answer.status, answer.error_type) == (504, "broadcast_failed")
    assert [replica.ready for replica in replicas] == [set()] * 2


async def test_a_name_that_is_loaded_already_is_refused_under_the_same_path_too(
    harness: Harness,
) -> None:
    proxy, replicas = await stock_fleet(harness, 2)
    assert (await load(proxy, "policy-v1", "/adapters/1")).status == 200
    for path in ("/adapters/1", "/adapters/other"):  # a trainer that started again
        answer = await load(proxy, "policy-v1", path)
        assert (answer.status, answer.error_type) == (400, "broadcast_failed")
        assert [replica.ready for replica in replicas] == [{"policy-v1"}] * 2  # still the first one
    await replicas[0].stop()  # and comes back empty: all or nothing is left to load
    await proxy.until_up(1)
    replicas[0].ready = set()
    await replicas[0].start()
    await proxy.until_up(2)
    assert (await load(proxy, "policy-v1", "/adapters/1")).status == 400
    assert [replica.ready for replica in replicas] == [set(), {"policy-v1"}]
    replicas[0].ready.add("stale-v1")  # from an earlier run: may be other weights
    answer = await load(proxy, "stale-v1")
    assert answer.status == 400
    assert "already been loaded" in answer.json()["error"]["message"]
    assert replicas[1].ready == {"policy-v1"}


async def test_loading_in_place_is_refused(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, 1)
    answer = await call(
        proxy, "/v1/load_lora_adapter", lora_name="a-v1", lora_path="/a", load_inplace=True
    )
    assert (answer.status, answer.error_type) == (400, "bad_request")
    for body in (b"", b"[]", b"{}", b'{"lora_name": 5}'):
        answer = await proxy.request("POST", "/v1/load_lora_adapter", body=body)
        assert answer.status == 400
    assert replicas[0].pushed == []


async def test_a_dead_replica_does_not_block_a_sync(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, poll_s=30.0)
    await replicas[0].stop()  # the proxy has not noticed yet
    assert (await load(proxy, "policy-v1")).status == 200
    assert [replica.ready for replica in replicas[1:]] == [{"policy-v1"}] * 2
    await replicas[1].stop()
    await replicas[2].stop()
    answer = await load(proxy, "policy-v2")
    assert (answer.status, answer.error_type) == (503, "no_replica")


async def test_a_pause_that_fails_on_one_replica_is_taken_back_on_all(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness)
    replicas[2].push_fails["/pause"] = 500
    assert (await call(proxy, "/pause")).status == 500
    assert [replica.paused for replica in replicas] == [False] * 3


async def test_a_pause_that_nobody_ends_is_ended_by_its_lease(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, 2, pause_lease_s=0.3)
    assert (await call(proxy, "/pause")).status == 200
    assert [replica.paused for replica in replicas] == [True] * 2
    await until(lambda: not any(replica.paused for replica in replicas))


async def test_a_replica_that_does_not_resume_is_left_out_until_it_does(harness: Harness) -> None:
    proxy, replicas = await stock_fleet(harness, 2)
    assert (await call(proxy, "/pause")).status == 200
    replicas[0].push_fails["/resume"] = 500
    assert (await call(proxy, "/resume")).status == 500
    for number in range(4):
        answer = await proxy.generate("base", prompt=[number])
        assert answer.json()["served_by"] == replicas[1].port
    unhealthy = (await proxy.get("/health")).json()["unhealthy"]
    assert unhealthy == {replicas[0].url: "it was paused and has not resumed"}
    del replicas[0].push_fails["/resume"]
    await proxy.until_up(2)
    assert not replicas[0].paused


async def test_a_replica_that_was_away_during_resume_is_resumed_when_it_is_back(
    harness: Harness,
) -> None:
    proxy, replicas = await stock_fleet(harness, 2)
    assert (await call(proxy, "/pause")).status == 200
    replicas[0].healthy = False
    await proxy.until_up(1)
    assert (await call(proxy, "/resume")).status == 200
    replicas[0].healthy = True
    await proxy.until_up(2)
    assert not replicas[0].paused


async def test_a_proxy_that_stops_resumes_what_it_paused() -> None:
    replica = StandIn(plugin=False)
    async with Harness() as outer:
        await outer.replica(replica)
        async with Harness() as inner:
            proxy = await inner.proxy(replica, allow_broadcast=True)
            assert (await call(proxy, "/pause")).status == 200
        assert not replica.paused

"""Which replica a generation reaches: only one on which the named version is ready."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.proxy.proxy_harness import Harness, until
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio


async def test_a_generation_reaches_only_replicas_on_which_its_version_is_ready(
    harness: Harness,
) -> None:
    with_v1, with_both, empty = (
        await harness.replica(StandIn(ready={"run-v1"})),
        await harness.replica(StandIn(ready={"run-v1", "run-v2"})),
        await harness.replica(),
    )
    proxy = await harness.proxy(with_v1, with_both, empty)
    answers = await asyncio.gather(*(proxy.generate(f"run-v{1 + i % 2}") for i in range(40)))
    assert [answer.status for answer in answers] == [200] * 40
    assert {answer.json()["model"] for answer in answers[1::2]} == {"run-v2"}
    assert set(with_v1.names()) == {"run-v1"}
    assert with_both.names().count("run-v2") == 20
    assert empty.generations == []
    assert proxy.in_flight() == [0, 0, 0]


async def test_a_base_model_request_goes_to_any_replica_and_idle_ones_share_evenly(
    harness: Harness,
) -> None:
    replicas = await harness.replicas(3)
    proxy = await harness.proxy(*replicas)
    for _ in range(9):
        assert (await proxy.generate("base")).status == 200
    assert [len(replica.generations) for replica in replicas] == [3, 3, 3]


async def test_a_request_without_model_is_served_by_the_base_model(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica())
    assert (await proxy.generate(None)).status == 200


async def test_a_replica_that_is_behind_gets_less(harness: Harness) -> None:
    slow, quick = await harness.replicas(2, "run-v1")

    async def take_time(received: object, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    slow.behaviour = take_time
    proxy = await harness.proxy(slow, quick)
    prompts = iter(range(200))

    async def one_after_another() -> None:
        for prompt in prompts:
            assert (await proxy.generate("run-v1", prompt=[prompt])).status == 200

    await asyncio.gather(*(one_after_another() for _ in range(16)))
    assert len(quick.generations) > 2 * len(slow.generations)


async def test_rollouts_of_one_prompt_share_a_replica_and_prompts_are_spread(
    harness: Harness,
) -> None:
    replicas = await harness.replicas(3, "run-v1")
    proxy = await harness.proxy(*replicas)
    served = {}
    for group in range(6):
        ids = list(range(group * 1000, group * 1000 + 200))
        answers = [await proxy.generate("run-v1", prompt=ids, max_tokens=64) for _ in range(8)]
        ports = {answer.json()["served_by"] for answer in answers}
        assert len(ports) == 1
        served[group] = ports.pop()
    assert sorted(list(served.values()).count(replica.port) for replica in replicas) == [2, 2, 2]
    page = (await proxy.get("/metrics")).body.decode()
    assert 'bucket_lora_proxy_routed_total{outcome="hit"} 42.0' in page
    assert 'bucket_lora_proxy_routed_total{outcome="new"} 6.0' in page
    assert proxy.outstanding() == [0, 0, 0]


async def test_blocks_of_a_lost_replica_and_of_a_retired_version_are_forgotten(
    harness: Harness,
) -> None:
    first, second = await harness.replicas(2, "run-v1", "run-v2")
    proxy = await harness.proxy(first, second)
    index = proxy.deps.router.index
    for _ in range(2):
        for name in ("run-v1", "run-v2"):
            for number in range(2):
                await proxy.generate(name, prompt=[number] * 160)
    assert index.names() == {"run-v1", "run-v2"}
    first.ready.discard("run-v1")
    second.ready.discard("run-v1")
    await until(lambda: index.names() == {"run-v2"})
    await first.stop()
    await until(lambda: index.blocks(0) == 0)
    assert index.blocks(1) > 0


async def test_another_process_behind_the_same_address_holds_nothing(harness: Harness) -> None:
    """It came up between two status calls, so that nothing failed."""
    replica = await harness.replica(StandIn(ready={"run-v1"}, replica_id="before"))
    proxy = await harness.proxy(replica)
    index = proxy.deps.router.index
    await proxy.generate("run-v1", prompt=[1] * 160)
    await asyncio.sleep(0.15)
    assert index.blocks(0) == 10
    replica.replica_id = "after"
    await until(lambda: index.blocks(0) == 0)


async def test_the_cache_of_a_replica_is_taken_as_it_tells(harness: Harness) -> None:
    page = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="1"} 1.0\n'
    replica = await harness.replica(StandIn(ready={"run-v1"}, metrics_page=page))
    proxy = await harness.proxy(replica)
    for number in range(3):
        await proxy.generate("run-v1", prompt=[number] * 160)
    await until(lambda: proxy.deps.router.index.blocks(0) == 8)


async def test_a_request_is_held_until_its_version_becomes_ready(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, poll_s=30.0)
    held = asyncio.create_task(proxy.generate("run-v2"))
    await asyncio.sleep(0.2)
    assert replica.generations == []
    began = asyncio.get_running_loop().time()
    replica.make_ready("run-v2")
    answer = await held
    assert answer.json()["model"] == "run-v2"
    assert asyncio.get_running_loop().time() - began < 10  # the long-poll, not the plain watch


async def test_a_version_that_never_becomes_ready_ends_in_503_with_a_reason(
    harness: Harness,
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1", "other-v7"}))
    proxy = await harness.proxy(replica, adapter_wait_s=0.2)
    answer = await proxy.generate("run-v2")
    assert (answer.status, answer.error_type) == (503, "adapter_not_ready")
    assert answer.header("retry-after") == "1"
    assert answer.json()["error"]["served"] == ["run-v1"]
    assert answer.json()["error"]["retryable"] is True
    assert replica.generations == []
    assert proxy.deps.watcher.awaited() == []


async def test_a_retired_version_is_refused_at_once_and_says_what_is_served(
    harness: Harness,
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v8", "run-v9", "run-v10"}))
    proxy = await harness.proxy(replica, adapter_wait_s=30.0)
    answer = await proxy.generate("run-v2")
    assert (answer.status, answer.error_type) == (410, "adapter_retired")
    assert answer.json()["error"]["served"] == ["run-v8", "run-v9", "run-v10"]
    assert answer.json()["error"]["retryable"] is False


async def test_a_version_refused_everywhere_is_refused_with_the_replicas_reason(
    harness: Harness,
) -> None:
    replicas = await harness.replicas(2)
    for replica in replicas:
        replica.refused["run-v1"] = "rank 64 is above --max-lora-rank 8"
    proxy = await harness.proxy(*replicas, adapter_wait_s=30.0)
    answer = await proxy.generate("run-v1")
    assert (answer.status, answer.error_type) == (409, "adapter_refused")
    assert "--max-lora-rank 8" in answer.json()["error"]["message"]


async def test_a_version_refused_on_one_replica_is_awaited_on_the_other(harness: Harness) -> None:
    refusing, slow = await harness.replicas(2)
    refusing.refused["run-v1"] = "no"
    proxy = await harness.proxy(refusing, slow, adapter_wait_s=5.0)
    held = asyncio.create_task(proxy.generate("run-v1"))
    await asyncio.sleep(0.2)
    slow.make_ready("run-v1")
    assert (await held).json()["served_by"] == slow.port


async def test_an_unknown_model_is_never_replaced_by_another(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica)
    for name in ("gpt", "", "run", "run-v01", "run-v1 ", "RUN-V1"):
        answer = await proxy.generate(name)
        assert (answer.status, answer.error_type) == (404, "model_not_found"), name
    assert replica.generations == []


async def test_a_name_inside_a_prompt_does_not_pass_for_the_model(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica)
    body = b'{"prompt": "\\"model\\": \\"base\\"", "x": {"model": "base"}, "model": "run-v1"}'
    answer = await proxy.request("POST", "/v1/completions", body=body)
    assert answer.json()["model"] == "run-v1"
    assert replica.generations[0].body == body


async def test_of_a_repeated_model_the_last_counts_as_for_the_server(harness: Harness) -> None:
    with_v1, with_v2 = (
        await harness.replica(StandIn(ready={"run-v1"})),
        await harness.replica(StandIn(ready={"run-v2"})),
    )
    proxy = await harness.proxy(with_v1, with_v2)
    body = b'{"model": "run-v1", "model": "run-v2"}'
    assert json.loads(body) == {"model": "run-v2"}
    answer = await proxy.request("POST", "/v1/completions", body=body)
    assert answer.json()["served_by"] == with_v2.port


async def test_a_replica_that_lost_an_adapter_since_its_last_status_is_passed_over(
    harness: Harness,
) -> None:
    stale, good = await harness.replicas(2, "run-v1")
    proxy = await harness.proxy(stale, good, poll_s=30.0)
    stale.ready.clear()  # restarted empty; the proxy has not asked since
    for _ in range(4):
        assert (await proxy.generate("run-v1")).json()["served_by"] == good.port


async def test_a_stock_server_takes_part_with_the_adapters_of_its_model_list(
    harness: Harness,
) -> None:
    stock = await harness.replica(StandIn(plugin=False, ready={"policy-v1"}))
    proxy = await harness.proxy(stock)
    assert (await proxy.generate("policy-v1")).status == 200
    held = asyncio.create_task(proxy.generate("policy-v2"))
    await asyncio.sleep(0.1)
    stock.ready.add("policy-v2")
    assert (await held).status == 200


async def test_without_any_replica_a_request_is_refused_at_once(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, adapter_wait_s=30.0)
    await replica.stop()
    await proxy.until_up(0)
    for name in ("base", "run-v1"):
        answer = await proxy.generate(name)
        assert (answer.status, answer.error_type) == (503, "no_replica")
        assert answer.header("retry-after") == "1"
        assert replica.url in answer.json()["error"]["message"]

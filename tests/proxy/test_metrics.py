"""What ``/metrics`` says while generations wait, run and end."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.proxy.proxy_harness import Harness, Proxy, until
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio


async def value(proxy: Proxy, name: str, **labels: str) -> float | None:
    page = (await proxy.get("/metrics")).body.decode()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"bucket_lora_proxy_{name}" and labels == sample.labels:
                return float(sample.value)
    return None


async def test_what_is_in_flight_is_told_by_replica_and_version(harness: Harness) -> None:
    release = asyncio.Event()

    async def slow(received: object, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    replica = await harness.replica(StandIn(ready={"run-v1", "run-v2"}, behaviour=slow))
    proxy = await harness.proxy(replica)
    models = ["run-v1", "run-v2", "run-v2", None]
    asked = [asyncio.create_task(proxy.generate(model)) for model in models]
    await until(lambda: proxy.in_flight() == [4])
    for model, count in (("run-v1", 1), ("run-v2", 2), ("", 1)):
        labels = {"replica": replica.url, "model": model}
        assert await value(proxy, "in_flight_by_model", **labels) == count
    assert await value(proxy, "in_flight", replica=replica.url) == 4
    tokens = await value(proxy, "outstanding_tokens", replica=replica.url)
    assert tokens is not None
    assert tokens > 0
    release.set()
    await asyncio.gather(*asked)
    labels = {"replica": replica.url, "model": "run-v2"}
    assert await value(proxy, "in_flight_by_model", **labels) is None  # no series for each version
    assert await value(proxy, "outstanding_tokens", replica=replica.url) == 0


async def test_the_phases_of_a_generation_are_timed(harness: Harness) -> None:
    async def answering(received: object, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"{}")

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=answering))
    proxy = await harness.proxy(replica)
    assert (await proxy.generate("run-v1")).status == 200
    assert await value(proxy, "phase_seconds_count", phase="adapter_wait") == 0
    for phase, least in (("first_byte", 0.2), ("answer", 0.1)):
        assert await value(proxy, "phase_seconds_count", phase=phase) == 1
        seconds = await value(proxy, "phase_seconds_sum", phase=phase)
        assert seconds is not None
        assert 0.9 * least <= seconds < least + 5  # not the milliseconds' number
    waiting = asyncio.create_task(proxy.generate("run-v2"))
    await until(lambda: proxy.deps.watcher.awaited() == ["run-v2"])
    await asyncio.sleep(0.3)
    replica.make_ready("run-v2")
    assert (await waiting).status == 200
    assert await value(proxy, "phase_seconds_count", phase="adapter_wait") == 1
    waited = await value(proxy, "phase_seconds_sum", phase="adapter_wait")
    assert waited is not None
    assert waited > 0.2
    assert await value(proxy, "adapter_waits_total") == 1


async def test_members_are_counted_by_source_and_state(harness: Harness) -> None:
    proxy = await harness.proxy(
        await harness.replica(), await harness.replica(StandIn(healthy=False))
    )
    assert await value(proxy, "members", source="static", state="up") == 1
    assert await value(proxy, "members", source="static", state="down") == 1
    assert await value(proxy, "members", source="bucket", state="up") == 0


async def test_the_lag_of_a_run_is_that_of_its_slowest_replica(harness: Harness) -> None:
    first = await harness.replica(StandIn(ready={"run-v3", "run-v4"}))
    second = await harness.replica(StandIn(ready={"run-v2"}))
    proxy = await harness.proxy(first, second)
    assert await value(proxy, "run_latest_version", run="run") == 4
    assert await value(proxy, "run_lag_versions", run="run") == 2
    await second.stop()
    await proxy.until_up(1)
    assert await value(proxy, "run_lag_versions", run="run") == 0

"""The plugin's own heartbeats, and heartbeats on a real S3 server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapter_bucket.heartbeat import remove_heartbeat, write_heartbeat
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.proxy.beating import follow, heartbeat, members
from tests.proxy.proxy_harness import Harness, until
from tests.proxy.stand_in import StandIn
from tests.s3_servers import S3Server, seaweed, seaweed_pair
from vllm_bucket_lora.heartbeats import Heart

__all__ = ["seaweed", "seaweed_pair"]

pytestmark = pytest.mark.anyio


async def test_a_servers_own_heartbeats_bring_it_in_and_its_end_takes_it_out(
    harness: Harness, bucket: str, store: Store
) -> None:
    """No run exists: the trainer that will make one waits for the proxy's health."""
    replica = await harness.replica()
    proxy = await follow(harness, bucket)
    status = heartbeat(replica.url).status
    with ThreadPoolExecutor(1) as executor:
        heart = Heart(
            store, replica_id="one", url=replica.url, status=lambda: status, executor=executor
        )
        beating = asyncio.create_task(heart.beat())
        await proxy.until_up(1)
        assert (await proxy.get("/health")).status == 200
        beating.cancel()
        await asyncio.wait([beating])
        await replica.stop()
        await until(lambda: members(proxy) == [])


async def test_heartbeats_are_followed_on_a_real_s3_server(
    harness: Harness, seaweed: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**seaweed.environment, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    bucket = seaweed.url(seaweed.new_bucket(), "rl")
    store = open_store(bucket)
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url))
    proxy = await follow(harness, bucket, bucket_poll_s=0.2)
    await proxy.until_up(1)
    assert (await proxy.generate("run-v1")).status == 200
    remove_heartbeat(store, "run", "one")
    await replica.stop()
    await until(lambda: members(proxy) == [])

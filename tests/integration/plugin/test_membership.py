"""A proxy that is told nothing but the bucket finds a real server, before there is any run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bucket_lora_proxy.membership.rule import AllowRule
from bucket_lora_proxy.watcher import block_tokens, cache_blocks
from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import API_KEY, Server
from tests.proxy.proxy_harness import Harness, until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

WAIT_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def harness(anyio_backend: object) -> AsyncIterator[Harness]:
    async with Harness() as started:
        yield started


async def test_it_joins_by_its_heartbeat_and_serves_a_run_that_begins_later(
    harness: Harness, server: Server, bucket: Path, new_run: RunMaker
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    proxy = await harness.proxy(
        bucket=f"file://{bucket}",
        allow_replicas=(AllowRule.parse("http://127.0.0.1:*", token=API_KEY),),
        bucket_poll_s=0.2,
        control_timeout_s=10.0,
        adapter_wait_s=WAIT_S,
    )
    fleet = proxy.deps.fleet
    await until(lambda: [replica.url for replica in fleet.up()] == [url], WAIT_S)
    assert (await proxy.get("/health")).status == 200
    run = new_run("by-heartbeat")
    run.publish(1)
    body = json.dumps({"model": run.name(1), "prompt": [72, 101, 108], "max_tokens": 4})
    answer = await proxy.request(
        "POST",
        "/v1/completions",
        headers={"content-type": "application/json"},
        body=body.encode(),
    )
    assert answer.status == 200, answer.body
    assert answer.json()["model"] == run.name(1)


def test_a_real_server_tells_the_size_of_its_prefix_cache(server: Server) -> None:
    page = server.text("/metrics")
    tokens, blocks = block_tokens(page), cache_blocks(page)
    assert tokens is not None
    assert tokens % 16 == 0
    assert blocks is not None
    assert blocks >= tokens // 16

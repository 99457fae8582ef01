"""Heartbeats of stand-ins in a bucket, and proxies that follow them."""

from __future__ import annotations

import time
from typing import Any

from adapter_bucket.heartbeat import Heartbeat
from adapter_bucket.status import ReplicaStatus
from bucket_lora_proxy.membership.rule import AllowRule
from tests.proxy.proxy_harness import Harness, Proxy
from tests.proxy.stand_in import StandIn

LOCAL = AllowRule.parse("http://127.0.0.1:*")


def heartbeat(
    url: str,
    *,
    run_id: str | None = "run",
    replica_id: str = "one",
    number: int = 0,
    every_s: float = 60,
) -> Heartbeat:
    return Heartbeat(
        run_id=run_id,
        replica_id=replica_id,
        url=url,
        sequence=number,
        interval_s=every_s,
        written_at=time.time(),
        status=ReplicaStatus(
            replica_id=replica_id, base_model="base", dtype="float32", max_loras=4, max_lora_rank=8
        ),
    )


async def follow(harness: Harness, bucket: str, *static: StandIn, **settings: Any) -> Proxy:
    given: dict[str, Any] = {
        "allow_replicas": (LOCAL,),
        "bucket_poll_s": 0.05,
        "unresponsive_s": 0.3,
    }
    return await harness.proxy(*static, bucket=bucket, **(given | settings))


def members(proxy: Proxy) -> list[str]:
    return [replica.url for replica in proxy.deps.fleet.replicas]

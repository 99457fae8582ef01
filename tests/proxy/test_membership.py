"""Replicas that come and go with their heartbeats in a real bucket folder."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from adapter_bucket.heartbeat import remove_heartbeat, write_heartbeat
from adapter_bucket.store import Store
from bucket_lora_proxy.membership.heartbeats import View
from bucket_lora_proxy.membership.rule import AllowRule
from tests.proxy.beating import follow, heartbeat, members
from tests.proxy.proxy_harness import Harness, until
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio

TOKEN = "replica-token-0123456789"


async def test_a_replica_joins_with_its_heartbeat_and_serves(
    harness: Harness, bucket: str, store: Store
) -> None:
    proxy = await follow(harness, bucket)
    refused = await proxy.generate("run-v1")
    assert (refused.status, refused.error_type) == (503, "no_replica")
    assert refused.header("retry-after") is not None
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url))
    await proxy.until_up(1)
    assert (await proxy.generate("run-v1")).json()["served_by"] == replica.port
    page = (await proxy.get("/metrics")).body.decode()
    assert 'bucket_lora_proxy_membership_changes_total{change="join"} 1.0' in page


async def test_a_replica_joins_before_there_is_any_run(
    harness: Harness, bucket: str, store: Store
) -> None:
    """A trainer waits for its servers before it makes its run."""
    replica = await harness.replica()
    proxy = await follow(harness, bucket)
    assert (await proxy.get("/health")).status == 503
    write_heartbeat(store, heartbeat(replica.url, run_id=None))
    await proxy.until_up(1)
    assert (await proxy.get("/health")).status == 200
    assert (await proxy.generate("base")).status == 200


async def test_no_replica_is_told_at_once_with_the_reason_and_heals(
    harness: Harness, bucket: str, store: Store
) -> None:
    proxy = await follow(harness, bucket, adapter_wait_s=30.0)
    await until(lambda: "no live heartbeat" in proxy.deps.fleet.note)
    begun = time.monotonic()
    answer = await proxy.generate("run-v1")
    health = await proxy.get("/health")
    assert time.monotonic() - begun < 10  # not after the 30 s of an adapter that may yet come
    assert answer.status == health.status == 503
    assert bucket in answer.json()["error"]["message"]
    assert health.json()["status"] == "unhealthy"
    assert health.json()["message"] == "0/0 servers unhealthy"
    assert "no live heartbeat" in health.json()["membership"]
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url))
    await proxy.until_up(1)
    assert (await proxy.generate("run-v1")).status == 200
    assert "membership" not in (await proxy.get("/health")).json()


async def test_a_replica_that_waits_for_a_version_hears_of_one_that_joins_meanwhile(
    harness: Harness, bucket: str, store: Store
) -> None:
    static = await harness.replica()
    proxy = await follow(harness, bucket, static, adapter_wait_s=5.0)
    waiting = asyncio.create_task(proxy.generate("run-v1"))
    await until(lambda: static.long_polls > 0)
    late = await harness.replica()
    write_heartbeat(store, heartbeat(late.url))
    await proxy.until_up(2)
    await until(lambda: late.long_polls > 0)
    late.make_ready("run-v1")
    assert (await waiting).json()["served_by"] == late.port


async def test_a_replica_without_a_heartbeat_stays_while_it_answers_and_leaves_when_it_does_not(
    harness: Harness, bucket: str, store: Store
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    other = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url, replica_id="one"))
    write_heartbeat(store, heartbeat(other.url, replica_id="two", every_s=0.02))
    proxy = await follow(harness, bucket)
    await proxy.until_up(2)
    remove_heartbeat(store, "run", "one")  # as at the end of a run
    await asyncio.sleep(0.6)
    assert len(members(proxy)) == 2
    await replica.stop()  # heartbeat gone
    await until(lambda: members(proxy) == [other.url])
    await other.stop()  # heartbeat stale
    await until(lambda: members(proxy) == [])
    page = (await proxy.get("/metrics")).body.decode()
    assert 'bucket_lora_proxy_membership_changes_total{change="leave"} 2.0' in page


async def test_a_replica_that_is_down_stays_while_its_heartbeat_is_alive(
    harness: Harness, bucket: str, store: Store
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url))
    proxy = await follow(harness, bucket)
    await proxy.until_up(1)
    await replica.stop()
    await proxy.until_up(0)
    await asyncio.sleep(0.6)
    assert members(proxy) == [replica.url]
    await replica.start()
    await proxy.until_up(1)


async def test_a_static_replica_never_leaves_and_is_not_doubled(
    harness: Harness, bucket: str, store: Store
) -> None:
    replica = await harness.replica()
    write_heartbeat(store, heartbeat(replica.url + "/"))
    proxy = await follow(harness, bucket, replica)
    await until(lambda: proxy.deps.fleet.replicas[0].runs == ("run",))
    assert members(proxy) == [replica.url]
    remove_heartbeat(store, "run", "one")
    await replica.stop()
    await asyncio.sleep(0.8)
    assert members(proxy) == [replica.url]


async def test_an_address_that_is_not_allowed_is_never_connected_to(
    harness: Harness, bucket: str, store: Store
) -> None:
    replica = await harness.replica()
    write_heartbeat(store, heartbeat(replica.url))
    rule = AllowRule.parse("https://*.example.org")
    proxy = await follow(harness, bucket, allow_replicas=(rule,), replica_token=TOKEN)
    await until(lambda: "no --allow-replica pattern" in proxy.deps.fleet.note)
    await asyncio.sleep(0.3)
    assert members(proxy) == []
    assert replica.connections == 0
    message = (await proxy.generate("run-v1")).json()["error"]["message"]
    assert "run/one" in message
    assert replica.url in message


async def test_each_replica_is_sent_its_own_token(
    harness: Harness, bucket: str, store: Store
) -> None:
    tokens = [f"{TOKEN}-{number}" for number in range(3)]
    fixed, own, named = [await harness.replica(StandIn(token=token)) for token in tokens]
    write_heartbeat(store, heartbeat(named.url))
    proxy = await follow(
        harness,
        bucket,
        fixed,
        own,
        expect_up=3,
        replica_token=tokens[0],
        replica_tokens={own.url: tokens[1]},
        allow_replicas=(AllowRule.parse("http://127.0.0.1:*", token=tokens[2]),),
    )
    await proxy.until_up(3)
    assert [one.unauthorised for one in (fixed, own, named)] == [0, 0, 0]


async def test_a_bucket_that_cannot_be_read_changes_nothing(
    harness: Harness, bucket: str, store: Store, tmp_path: Path
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url, every_s=0.02))
    proxy = await follow(harness, bucket)
    await proxy.until_up(1)
    proxy.deps.membership.take_in(View(fault="StoreUnavailable: gone"))
    assert members(proxy) == [replica.url]
    assert "StoreUnavailable: gone" in proxy.deps.fleet.note
    absent = await follow(harness, f"file://{tmp_path}/no/such/folder")
    await until(lambda: "cannot be read" in absent.deps.fleet.note)
    assert (await absent.generate("run-v1")).status == 503


async def test_members_are_bounded(harness: Harness, bucket: str, store: Store) -> None:
    started = await harness.replicas(3)
    for number, replica in enumerate(started):
        write_heartbeat(store, heartbeat(replica.url, replica_id=f"r{number}"))
    proxy = await follow(harness, bucket, max_replicas=2)
    await proxy.until_up(2)
    await until(lambda: "--max-replicas is 2" in proxy.deps.fleet.note)
    assert len(members(proxy)) == 2


async def test_a_replica_that_joins_starts_slowly(
    harness: Harness, bucket: str, store: Store
) -> None:
    release = asyncio.Event()

    async def slow(received: object, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    first = await harness.replica(StandIn(ready={"run-v1"}, behaviour=slow))
    proxy = await follow(harness, bucket, first, slow_start_s=20.0)
    proxy.deps.fleet.replicas[0].warm_at -= 100  # long ago
    late = await harness.replica(StandIn(ready={"run-v1"}, behaviour=slow))
    write_heartbeat(store, heartbeat(late.url))
    await proxy.until_up(2)
    waiting = [asyncio.create_task(proxy.generate("run-v1", prompt=[n])) for n in range(40)]
    await until(lambda: sum(proxy.in_flight()) == 40)
    assert proxy.in_flight()[1] <= 4  # by cost alone it would be half
    release.set()
    assert {(await one).status for one in waiting} == {200}


async def test_the_slot_and_the_blocks_of_a_replica_that_left_are_given_up(
    harness: Harness, bucket: str, store: Store
) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(replica.url, every_s=0.02))
    proxy = await follow(harness, bucket)
    await proxy.until_up(1)
    member = proxy.deps.fleet.replicas[0]
    await proxy.generate("run-v1", prompt=list(range(64)))
    assert proxy.deps.router.index.blocks(member.slot) == 4
    await replica.stop()
    await until(lambda: members(proxy) == [])
    later = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(later.url, number=1))
    await proxy.until_up(1)
    assert proxy.deps.fleet.replicas[0].slot == member.slot
    assert proxy.deps.router.index.blocks(member.slot) == 0
    proxy.deps.watcher.failed(member, "late news of the one that left")
    assert len(proxy.deps.fleet.up()) == 1


async def test_what_a_leaving_replica_was_asked_goes_to_another(
    harness: Harness, bucket: str, store: Store
) -> None:
    async def never(received: object, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    leaving = await harness.replica(StandIn(ready={"run-v1"}, behaviour=never))
    write_heartbeat(store, heartbeat(leaving.url))
    proxy = await follow(harness, bucket, control_timeout_s=1.0)
    await proxy.until_up(1)
    member = proxy.deps.fleet.replicas[0]
    asked = [asyncio.create_task(proxy.generate("run-v1")) for _ in range(5)]
    await until(lambda: member.in_flight == 5)
    other = await harness.replica(StandIn(ready={"run-v1"}))
    write_heartbeat(store, heartbeat(other.url, replica_id="two"))
    await proxy.until_up(2)
    remove_heartbeat(store, "run", "one")
    leaving.frozen = True  # the machine is gone, its connections are not
    await until(lambda: members(proxy) == [other.url])
    assert [(await one).json()["served_by"] for one in asked] == [other.port] * 5
    assert (member.in_flight, member.by_model, member.outstanding) == (0, {}, 0)
    assert proxy.in_flight() == [0]

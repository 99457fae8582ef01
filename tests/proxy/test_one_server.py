"""What the proxy answers as one server: status fan-in, health, models, metrics, the allow-list."""

from __future__ import annotations

import asyncio

import pytest

from adapter_bucket.status import FleetStatus, ReadyState
from tests.proxy.proxy_harness import Harness
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio


async def test_status_shows_every_replica_and_why_one_is_missing(harness: Harness) -> None:
    good, stock = (
        await harness.replica(StandIn(ready={"run-v1"})),
        await harness.replica(StandIn(plugin=False)),
    )
    gone = await harness.replica()
    proxy = await harness.proxy(good, stock, gone)
    await gone.stop()
    await proxy.until_up(2)
    status = FleetStatus.model_validate_json((await proxy.get("/bucket_lora/status")).body)
    assert set(status.replicas) == {good.url, stock.url, gone.url}
    shown = status.replicas[good.url]
    assert shown is not None
    assert shown.ready == ["run-v1"]
    assert status.replicas[gone.url] is None
    assert "cannot connect" in status.errors[gone.url]
    assert "no bucket-lora plugin" in status.errors[stock.url]
    assert status.adapter is None


async def test_status_waits_for_one_or_for_all_replicas(harness: Harness) -> None:
    first, second = await harness.replicas(2)
    proxy = await harness.proxy(first, second, poll_s=30.0)
    ask = "/bucket_lora/status?adapter=run-v1&wait=5&need="
    waiting_any = asyncio.create_task(proxy.get(ask + "any"))
    waiting_all = asyncio.create_task(proxy.get(ask + "all"))
    await asyncio.sleep(0.2)
    assert not waiting_any.done()
    first.make_ready("run-v1")
    adapter = FleetStatus.model_validate_json((await waiting_any).body).adapter
    assert adapter is not None
    assert (adapter.state, adapter.ready_on, adapter.replicas) == (ReadyState.READY, 1, 2)
    await asyncio.sleep(0.1)
    assert not waiting_all.done()
    second.make_ready("run-v1")
    adapter = FleetStatus.model_validate_json((await waiting_all).body).adapter
    assert adapter is not None
    assert (adapter.state, adapter.ready_on) == (ReadyState.READY, 2)


async def test_status_says_pending_with_the_reason_when_the_wait_is_over(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica)
    answer = await proxy.get("/bucket_lora/status?adapter=run-v1&wait=0.1")
    adapter = FleetStatus.model_validate_json(answer.body).adapter
    assert answer.status == 200
    assert adapter is not None
    assert adapter.state is ReadyState.PENDING
    assert adapter.reason == f"{replica.url}: the replica knows no such run (yet)"


async def test_status_does_not_wait_for_what_is_refused(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica(StandIn(refused={"run-v1": "no"})))
    answer = await proxy.get("/bucket_lora/status?adapter=run-v1&wait=20")
    adapter = FleetStatus.model_validate_json(answer.body).adapter
    assert adapter is not None
    assert adapter.state is ReadyState.REFUSED


@pytest.mark.parametrize("query", ["wait=-1", "wait=nan", "wait=x", "need=some"])
async def test_a_senseless_status_query_is_refused(harness: Harness, query: str) -> None:
    proxy = await harness.proxy(await harness.replica())
    answer = await proxy.get(f"/bucket_lora/status?adapter=run-v1&{query}")
    assert (answer.status, answer.error_type) == (400, "bad_request")


async def test_health_counts_unhealthy_servers_and_is_200_from_min_healthy_on(
    harness: Harness,
) -> None:
    first, second = await harness.replicas(2)
    proxy = await harness.proxy(first, second, min_healthy=2)
    good = await proxy.get("/health")
    assert (good.status, good.header("retry-after")) == (200, None)
    await first.stop()
    await proxy.until_up(1)
    answer = await proxy.get("/health")
    assert (answer.status, answer.json()["message"]) == (503, "1/2 servers unhealthy")
    assert first.url in answer.json()["unhealthy"]
    assert answer.header("retry-after") == "1"
    lenient = await harness.proxy(second)
    assert (await lenient.get("/health")).json()["message"] == "0/1 servers unhealthy"


@pytest.mark.parametrize("url", ["", "http://x", "http://127.0.0.1:0", "127.0.0.1"])
async def test_to_drain_what_is_no_replica_is_a_bad_request_that_names_those_there_are(
    harness: Harness, url: str
) -> None:
    first, second = await harness.replicas(2)
    proxy = await harness.proxy(first, second)
    answer = await proxy.request("POST", f"/proxy/drain?replica={url}")
    assert (answer.status, answer.error_type) == (400, "bad_request")
    assert answer.json()["error"]["retryable"] is False
    assert f"known are: {first.url}, {second.url}" in answer.json()["error"]["message"]
    for spelling in (f"{first.url}/", first.url.replace("http", "HTTP")):
        answer = await proxy.request("POST", f"/proxy/drain?replica={spelling}")
        assert (answer.status, answer.json()["replica"]) == (200, first.url)


async def test_models_are_those_that_all_replicas_list_with_the_smallest_context(
    harness: Harness,
) -> None:
    first, second = (
        await harness.replica(StandIn(ready={"run-v1", "run-v2"}, max_model_len=512)),
        await harness.replica(StandIn(ready={"run-v2"}, max_model_len=256)),
    )
    proxy = await harness.proxy(first, second)
    data = (await proxy.get("/v1/models")).json()["data"]
    assert (data[0]["id"], data[0]["max_model_len"]) == ("base", 256)
    assert [card["id"] for card in data] == ["base", "run-v2"]


async def test_replicas_without_a_common_base_model_are_reported(harness: Harness) -> None:
    proxy = await harness.proxy(
        await harness.replica(StandIn(base_model="a")), await harness.replica(StandIn())
    )
    answer = await proxy.get("/v1/models")
    assert (answer.status, answer.error_type) == (503, "models_differ")


async def test_metrics_show_replicas_and_requests(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica)
    await proxy.generate("run-v1")
    await proxy.generate("nothing")
    page = (await proxy.get("/metrics")).body.decode()
    label = f'{{replica="{replica.url}"}}'
    assert f"bucket_lora_proxy_replica_up{label} 1.0" in page
    assert f"bucket_lora_proxy_in_flight{label} 0.0" in page
    assert f"bucket_lora_proxy_replica_requests_total{label} 1.0" in page
    assert 'bucket_lora_proxy_requests_total{status="200"} 1.0' in page
    assert 'bucket_lora_proxy_requests_total{status="404"} 1.0' in page


FORBIDDEN = [
    "/collective_rpc",
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/init_weight_transfer_engine",
    "/update_weights",
    "/docs",
    "/openapi.json",
    "/v1/completions/",
    "//v1/completions",
    "/v1/completions/../../pause",
    "/invocations",
]


async def test_what_is_not_on_the_list_does_not_pass(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica)
    for path in FORBIDDEN:
        for method in ("GET", "POST"):
            answer = await proxy.request(method, path, body=b"{}" if method == "POST" else b"")
            assert (answer.status, answer.error_type) == (403, "route_forbidden"), path
    assert replica.generations == []


async def test_a_listed_path_takes_its_own_method_only(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica())
    assert (await proxy.get("/v1/completions")).status == 405
    assert (await proxy.request("POST", "/v1/models")).status == 405
    assert (await proxy.request("DELETE", "/health")).status == 405


async def test_headers_of_one_hop_and_of_the_other_side_do_not_cross(harness: Harness) -> None:
    async def answering(received: object, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: x-private\r\nx-private: 1\r\nset-cookie: a=b\r\n"
            b"x-request-id: 7\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        )

    replica = await harness.replica(StandIn(behaviour=answering))
    proxy = await harness.proxy(replica)
    answer = await proxy.request(
        "POST",
        "/v1/completions?x=1",
        body=b'{"model": "base"}',
        headers={
            "connection": "x-mine, keep-alive",
            "x-mine": "1",
            "cookie": "a=b",
            "te": "trailers",
            "x-request-id": "7",
            "content-type": "application/json",
        },
    )
    seen = replica.generations[0]
    assert seen.target == "/v1/completions"
    assert {name for name, _ in seen.headers} == {
        "host",
        "x-request-id",
        "content-type",
        "content-length",
    }
    assert seen.header("host") == f"127.0.0.1:{replica.port}"
    assert answer.header("x-request-id") == "7"
    for name in ("x-private", "set-cookie", "transfer-encoding", "connection"):
        assert answer.header(name) is None, name
    assert answer.header("content-length") == "2"


async def test_a_body_above_the_limit_is_refused_declared_or_not(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, max_body_bytes=1000)
    body = b'{"model": "base", "prompt": "' + b"x" * 2000 + b'"}'
    answer = await proxy.request("POST", "/v1/completions", body=body)
    assert (answer.status, answer.error_type) == (413, "body_too_large")
    async with proxy.client() as client:
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        )
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413")
    assert replica.generations == []


async def test_a_body_that_never_ends_is_given_up(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica(), body_timeout_s=0.2)
    async with proxy.client() as client:
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        )
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 5}', b"\xff\xfe{}", b'"x"'])
async def test_a_body_that_is_not_a_request_is_refused(harness: Harness, body: bytes) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica)
    answer = await proxy.request("POST", "/v1/completions", body=body)
    assert (answer.status, answer.error_type) == (400, "bad_request")
    assert replica.generations == []


async def test_server_info_is_answered_by_a_replica_with_its_query(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica)
    answer = await proxy.get("/server_info?config_format=json")
    assert (answer.status, answer.body) == (404, b'{"detail":"Not Found"}')

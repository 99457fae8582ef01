"""Clients that mean harm: smuggling, other routes, huge and slow requests, hostile names."""

from __future__ import annotations

import asyncio
import re

import pytest

from bucket_lora_proxy.guard import MAX_HEAD_BYTES, GuardedProtocol
from tests.proxy.proxy_harness import ANSWER_S, Harness, Proxy
from tests.proxy.stand_in import StandIn
from tests.proxy.wire import Received, answer_json

pytestmark = pytest.mark.anyio

TOKEN = "client-token-0123456789"
LOGIN = f"authorization: Bearer {TOKEN}\r\n".encode()


async def raw(proxy: Proxy, data: bytes, *, timeout_s: float = 3.0) -> bytes:
    """Write bytes, and read all that comes until the proxy closes, or is silent after it began."""
    async with proxy.client() as client:
        client.writer.write(data)
        got = b""
        try:
            while True:
                async with asyncio.timeout(timeout_s if got else ANSWER_S):
                    piece = await client.reader.read(65536)
                if not piece:
                    break
                got += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return got


def statuses(got: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", got)]


def post(*fields: bytes, body: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"host: x", LOGIN.strip(), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


SMUGGLED = b"POST /collective_rpc HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
JSON = b'{"model": "base"}'
SMUGGLING = {
    "length and chunks": post(
        b"content-length: 5", b"transfer-encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED
    ),
    "chunks and length": post(
        b"transfer-encoding: chunked", b"content-length: 5", body=b"0\r\n\r\n" + SMUGGLED
    ),
    "two lengths": post(b"content-length: 17", b"content-length: 0", body=JSON + SMUGGLED),
    "signed length": post(b"content-length: +17", body=JSON + SMUGGLED),
    "list of lengths": post(b"content-length: 17, 17", body=JSON + SMUGGLED),
    "chunked not last": post(b"transfer-encoding: chunked, gzip", body=b"0\r\n\r\n" + SMUGGLED),
    "odd chunked": post(b"transfer-encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
    "space before colon": post(b"content-length : 17", body=JSON + SMUGGLED),
    "folded field": post(b"x-a: b", b" content-length: 17", body=JSON + SMUGGLED),
    "bare LF": post(b"content-length: 17\nx-a: b", body=JSON + SMUGGLED),
    "bad chunk size": post(b"transfer-encoding: chunked", body=b"0x11\r\n" + JSON + SMUGGLED),
    "NUL in a field": post(b"x-a: a\x00b", b"content-length: 17", body=JSON + SMUGGLED),
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_a_request_inside_a_request_never_reaches_a_replica(
    harness: Harness, name: str
) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    got = statuses(await raw(proxy, SMUGGLING[name], timeout_s=1.0))
    # Either the first is refused, or it is taken and the second stands alone, without a token.
    assert got in ([400], [200, 401], [400, 401]), got
    for seen in replica.generations:
        assert seen.target == "/v1/completions"
        assert b"collective_rpc" not in seen.body
    assert {seen.target for seen in replica.pushed} == set()


async def test_a_coding_that_would_be_lost_on_the_way_is_refused(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    chunks = b"11\r\n" + JSON + b"\r\n0\r\n\r\n"
    got = await raw(proxy, post(b"transfer-encoding: gzip, chunked", body=chunks), timeout_s=0.2)
    assert statuses(got) == [501]
    assert replica.generations == []


async def test_a_pipelined_second_request_needs_its_own_token(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    data = post(b"content-length: 17", body=JSON) + SMUGGLED
    assert statuses(await raw(proxy, data, timeout_s=1.0)) == [200, 401]


@pytest.mark.parametrize(
    "target",
    [
        b"http://127.0.0.1:1/collective_rpc",
        b"http://evil.example/pause",
        b"/v1/completions/..%2f..%2fpause",
        b"/%2e%2e/collective_rpc",
        b"/health/../collective_rpc",
        b"/v1/completions;/collective_rpc",
        b"//collective_rpc",
        b"/v1/completions%00",
        b"/PAUSE",
        b"/v1/load_lora_adapter?x=/v1/completions",
        b"/bucket_lora/status/../../pause",
    ],
)
async def test_no_spelling_of_a_path_opens_another_route(harness: Harness, target: bytes) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    got = await raw(proxy, post(b"content-length: 17", body=JSON, path=target), timeout_s=0.2)
    assert statuses(got) in ([403], [400]), got
    assert replica.generations == replica.pushed == []


async def test_an_absolute_target_is_served_here_and_not_fetched(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    data = post(b"content-length: 17", body=JSON, path=b"http://evil.example/v1/completions")
    assert statuses(await raw(proxy, data, timeout_s=0.2)) == [200]
    assert replica.generations[0].target == "/v1/completions"
    assert replica.generations[0].header("host") == f"127.0.0.1:{replica.port}"


async def test_connect_and_upgrade_open_no_tunnel(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica(), tokens=(TOKEN,))
    tunnel = b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: x\r\n" + LOGIN + b"\r\n"
    assert 200 not in statuses(await raw(proxy, tunnel, timeout_s=0.2))
    upgrade = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    assert 101 not in statuses(await raw(proxy, upgrade + LOGIN + b"\r\n", timeout_s=0.2))


async def test_trailers_are_no_header_fields(harness: Harness) -> None:
    replica = await harness.replica()
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    chunks = b"11\r\n" + JSON + b"\r\n0\r\n"
    sneaky = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(await raw(proxy, sneaky + chunks + LOGIN + b"\r\n", timeout_s=0.2)) == [401]
    data = post(b"transfer-encoding: chunked", body=chunks + b"x-late: 1\r\n\r\n")
    assert statuses(await raw(proxy, data, timeout_s=0.2)) == [200]
    assert replica.generations[0].header("x-late") is None


@pytest.mark.parametrize("field", [b"x-big: ", b"authorization: Bearer "])
async def test_a_huge_head_is_refused_early(harness: Harness, field: bytes) -> None:
    proxy = await harness.proxy(await harness.replica(), tokens=(TOKEN,))
    data = b"GET /health HTTP/1.1\r\nhost: x\r\n" + field + b"y" * (10 * 1024 * 1024)
    assert statuses(await raw(proxy, data)) in ([400], [])  # [] if the reset overtook the answer
    many = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEAD_BYTES // 8))
    got = await raw(proxy, b"GET /health HTTP/1.1\r\nhost: x\r\n" + many)
    assert statuses(got) in ([400], [])
    assert (await proxy.get("/health", authorization=f"Bearer {TOKEN}")).status == 200


async def test_a_head_that_never_ends_is_closed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.3)
    proxy = await harness.proxy(await harness.replica())
    for data in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
        async with proxy.client() as client:
            client.writer.write(data)
            async with asyncio.timeout(2):
                for _ in range(3):  # a byte now and then does not extend it
                    await asyncio.sleep(0.08)
                    if not client.writer.transport.is_closing():  # on a slow machine it is
                        client.writer.write(b"x" if data else b"")
                assert await client.reader.read() == b""
    async with proxy.client() as client:  # but an idle kept connection is not touched by it
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200
        await asyncio.sleep(0.5)
        await client.send("GET", "/health")
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("count", [10**17, 10**300, 10**400])
async def test_no_number_of_completions_upsets_the_count_of_the_load(
    harness: Harness, count: int
) -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def hold_the_first(received: Received, writer: asyncio.StreamWriter) -> None:
        if "n" not in received.json():
            asked.set()
            await release.wait()
        await answer_json(writer, {})

    replica = await harness.replica(StandIn(ready={"run-v1"}, behaviour=hold_the_first))
    proxy = await harness.proxy(replica)
    first = asyncio.create_task(proxy.generate("run-v1"))
    await asked.wait()
    assert (await proxy.generate("run-v1", n=count)).status == 200
    release.set()
    assert (await first).status == 200
    assert (proxy.in_flight(), proxy.outstanding()) == ([0], [0.0])
    assert proxy.deps.fleet.replicas[0].data.active == set()


async def test_hostile_names_do_no_harm(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, adapter_wait_s=0.05)
    for name in ("../../etc/passwd", "run-v1\r\nx: y", "a" * 100_000, "\u0000", "run-v\u0661"):
        answer = await proxy.generate(name)
        assert (answer.status, answer.error_type) == (404, "model_not_found")
        assert len(answer.body) < 2000
    answer = await proxy.get("/bucket_lora/status?adapter=a%0d%0ab%26wait=9&wait=0.01")
    assert answer.status == 200
    assert replica.generations == []

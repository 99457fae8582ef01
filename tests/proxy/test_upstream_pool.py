"""Connections to a replica: kept, reused, closed, raced, timed out, cancelled."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from bucket_lora_proxy.errors import ConnectFailed, GivenUp, NoResponse, UpstreamTimeout
from bucket_lora_proxy.outbox import Outbox
from bucket_lora_proxy.upstream import Origin, Pool
from tests.proxy.proxy_harness import until
from tests.proxy.scripted import CHUNKED, OK, ask, talking, writes
from tests.proxy.wire import Received, answer

pytestmark = pytest.mark.anyio


async def test_an_early_answer_to_a_large_body_is_read() -> None:
    raw = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"

    done = asyncio.Event()

    async def at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await asyncio.sleep(0.2)
        writer.transport.abort()
        done.set()

    server = await asyncio.start_server(at_once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool(Origin.parse(url), limit=1, keep_alive_s=4, connect_timeout_s=2)
    assert await ask(pool, b"x" * 10_000_000) == (413, b"no")
    await done.wait()
    pool.close()
    server.close()


async def test_a_slow_reader_holds_the_sender_back() -> None:
    sent = 0

    async def flood(received: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        for _ in range(300):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")

    async with talking(flood) as (pool, _):
        with await pool.request(b"POST", b"/x", timeout_s=5.0) as response:
            await asyncio.sleep(0.3)
            assert sent < 16 * 65536 * 10  # socket buffers and one high-water mark, not 19 MB
            size = len(await response.read(max_bytes=64 * 1024 * 1024))
            assert size == 300 * 65536


async def test_silence_ends_in_a_timeout_but_slow_progress_does_not() -> None:
    async def drip(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 5\r\n\r\n")
        for byte in b"hello":
            await asyncio.sleep(0.3)
            writer.write(bytes([byte]))

    async with talking(drip) as (pool, _):
        assert await ask(pool, timeout_s=1.0) == (200, b"hello")
        with pytest.raises(UpstreamTimeout):
            await ask(pool, timeout_s=0.05)


async def test_a_connection_closed_while_idle_is_replaced_without_an_error() -> None:
    async def answer_then_close(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.005)
        writer.close()

    async with talking(answer_then_close) as (pool, server):
        for pause_s in (0.0, 0.003, 0.005, 0.006, 0.02) * 5:
            assert await ask(pool) == (200, b"ok")
            await asyncio.sleep(pause_s)
        assert len(server.requests) >= 25


async def test_a_reused_connection_that_dies_at_once_is_repeated_a_fresh_one_is_not() -> None:
    async def second_dies(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) in (2, 4):
            writer.transport.abort()
        else:
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(second_dies) as (pool, server):
        assert await ask(pool) == (200, b"ok")
        assert await ask(pool) == (200, b"ok")
        assert len(server.requests) == 3
        pool.drop_idle()
        with pytest.raises(NoResponse):
            await ask(pool)


async def test_idle_connections_are_reused_up_to_their_age_only() -> None:
    async with talking(writes(OK + b"content-length: 2\r\n\r\nok")) as (pool, server):
        pool._keep_alive_s = 0.5
        await ask(pool)
        await ask(pool)
        assert server.connections == 1
        await asyncio.sleep(0.6)
        await ask(pool)
        assert server.connections == 2


async def test_bytes_that_answer_no_request_never_become_an_answer() -> None:
    async def answer_twice(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        await writer.drain()
        writer.write(OK + b"content-length: 4\r\n\r\nevil")

    async with talking(answer_twice) as (pool, _):
        for _ in range(10):
            assert await ask(pool) == (200, b"ok")
            await asyncio.sleep(0.02)


async def test_an_answer_that_came_before_the_request_was_taken_ends_its_connection() -> None:
    connections = 0

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        await asyncio.sleep(0.3)  # reads nothing of the body
        writer.close()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = Pool(Origin.parse(url), limit=1, keep_alive_s=4, connect_timeout_s=2)
    for number in (1, 2):
        assert await ask(pool, b"x" * 30_000_000) == (200, b"ok")
        assert connections == number
    pool.close()
    server.close()
    await asyncio.sleep(0.3)


async def test_a_request_given_up_here_is_not_sent_again_although_its_connection_was_reused() -> (
    None
):
    async def second_hangs(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(OK + b"content-length: 2\r\n\r\nok")
        else:
            await asyncio.sleep(5)

    async with talking(second_hangs) as (pool, server):
        await ask(pool)
        hanging = asyncio.create_task(ask(pool))
        await until(lambda: len(server.requests) == 2)
        pool.fail_active("it was stopped")
        with pytest.raises(GivenUp, match="it was stopped"):
            await hanging
        assert (len(server.requests), server.connections) == (2, 1)


async def test_the_pool_never_opens_more_connections_than_its_limit() -> None:
    async def slowly(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(slowly, limit=3) as (pool, server):
        answers = await asyncio.gather(*(ask(pool) for _ in range(30)))
        assert answers == [(200, b"ok")] * 30
        assert server.connections == 3


async def test_what_waits_for_a_place_is_let_go_when_the_replica_is_given_up() -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async with talking(never, limit=1) as (pool, server):
        asked = [asyncio.create_task(ask(pool)) for _ in range(3)]
        await asyncio.sleep(0.05)
        pool.fail_active("it was stopped")
        faults = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(fault) for fault in faults] == [GivenUp, ConnectFailed, ConnectFailed]
        assert len(server.requests) == 1


async def test_what_is_still_connecting_is_let_go_when_the_replica_is_given_up() -> None:
    async def no_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read(-1)
        writer.close()

    connected = asyncio.Event()
    server = await asyncio.start_server(no_handshake, "127.0.0.1", 0)
    origin = Origin.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    tls = ssl.create_default_context()
    pool = Pool(origin, limit=1, keep_alive_s=4, connect_timeout_s=60, tls=tls)
    asked = [asyncio.create_task(ask(pool)) for _ in range(2)]
    await connected.wait()
    pool.close()
    done, hanging = await asyncio.wait(asked, timeout=5)
    for task in hanging:
        task.cancel()
    server.close()
    assert [type(task.exception()) for task in done] == [ConnectFailed, ConnectFailed]
    assert (pool.active, pool.connecting, pool._free) == (set(), set(), 1)


async def test_a_cancelled_exchange_closes_its_connection_and_frees_its_place() -> None:
    async def never(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 1:
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with talking(never, limit=1) as (pool, server):
        task = asyncio.create_task(ask(pool))
        await until(lambda: len(server.requests) == 1)
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        task.cancel()
        assert await waiting == (200, b"ok")
        assert server.connections == 2


async def test_a_port_where_nobody_listens_is_a_failed_connect() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    url = f"http://127.0.0.1:{port}"
    pool = Pool(Origin.parse(url), limit=1, keep_alive_s=4, connect_timeout_s=2)
    for _ in range(3):
        with pytest.raises(ConnectFailed, match=url):
            await ask(pool)


async def test_bytes_that_come_before_a_request_is_written_do_not_answer_it() -> None:
    """They may: the loop hands over what two sockets have received in one turn, and the request
    that the first one brings is written after it.
    """
    seen: list[bytes] = []

    async def keep(received: Received, writer: asyncio.StreamWriter) -> None:
        seen.append(received.body)
        await answer(writer, received.body)

    outbox = Outbox()
    async with talking(keep) as (plain, _):
        pool = Pool(plain.origin, limit=1, keep_alive_s=4, connect_timeout_s=2, outbox=outbox)
        assert await ask(pool, b"first") == (200, b"first")
        outbox.gathers = True
        asking = asyncio.create_task(ask(pool, b"second"))
        await asyncio.sleep(0)  # now it is begun, and not written
        (connection,) = pool.active
        connection.data_received(OK + b"content-length: 4\r\n\r\nlate")
        assert await asking == (200, b"second")  # on a fresh connection
        assert seen == [b"first", b"second"]
        pool.close()

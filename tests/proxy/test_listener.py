"""Many clients at once, and a system that has no room for one more."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from tests.proxy.proxy_harness import Harness, Proxy, until

pytestmark = pytest.mark.anyio

ASK = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def connected(proxy: Proxy, count: int) -> list[socket.socket]:
    """Connections that the kernel has made, and the proxy has not seen yet."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", proxy.port)))
        made[-1].sendall(ASK)
        made[-1].setblocking(False)
    return made


async def answer(client: socket.socket) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(client, 4096)


async def test_clients_that_connect_together_are_taken_together(harness: Harness) -> None:
    proxy = await harness.proxy(await harness.replica())
    clients = connected(proxy, 100)
    turns = 0
    while len(proxy.server.server_state.connections) < len(clients):
        await asyncio.sleep(0)
        turns += 1
        assert turns < 50
    answers = await asyncio.gather(*(answer(client) for client in clients))
    assert all(got.startswith(b"HTTP/1.1 200 ") for got in answers)
    for client in clients:
        client.close()
    await until(lambda: not proxy.server.server_state.connections)


@pytest.fixture
def file_limit() -> Iterator[int]:
    """The limit of open files; restored afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_free_file_descriptors_clients_wait_and_are_served_later(
    harness: Harness, file_limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await harness.proxy(await harness.replica(), poll_s=30.0)
    clients = connected(proxy, 5)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, file_limit))
    await until(lambda: "cannot accept a connection" in caplog.text)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, file_limit))
    for client in clients:
        assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        client.close()

"""Runs proxies in the test's event loop, and talks to them with h11, a parser of its own kind."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn

from bucket_lora_proxy.app import Deps, build_deps
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.server import Server
from bucket_lora_proxy.upstream import Origin
from tests.proxy.stand_in import StandIn

ANSWER_S = 10.0
"""A proxy that is silent for so long hangs."""


@dataclass
class Answer:
    """A complete answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def error_type(self) -> str:
        return str(self.json()["error"]["type"])


class Client:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(
        self, method: str, target: str, *, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        fields = [("host", "proxy"), *(headers or {}).items()]
        if body or method == "POST":
            fields.append(("content-length", str(len(body))))
        data = self._h11.send(h11.Request(method=method, target=target, headers=fields)) or b""
        data += self._h11.send(h11.Data(data=body)) or b""
        data += self._h11.send(h11.EndOfMessage()) or b""
        self.writer.write(data)
        await self.writer.drain()

    async def event(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(ANSWER_S):
                self._h11.receive_data(await self.reader.read(65536))
        return event

    async def answer(self) -> Answer:
        """Read one answer. Raises ``h11.RemoteProtocolError`` if it is cut."""
        response = await self.event()
        assert isinstance(response, h11.Response), response
        body = b""
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            body += bytes(event.data)
        headers = [(name.decode(), value.decode()) for name, value in response.headers]
        return Answer(response.status_code, headers, body)

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Proxy:
    """A running proxy."""

    config: ProxyConfig
    deps: Deps
    port: int
    server: uvicorn.Server
    client_tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.client_tls, server_hostname=self._name()
        )
        client = Client(reader, writer)
        try:
            yield client
        finally:
            client.close()

    def _name(self) -> str | None:
        return "localhost" if self.client_tls else None

    async def request(
        self, method: str, target: str, *, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        async with self.client() as client:
            await client.send(method, target, headers=headers, body=body)
            return await client.answer()

    async def get(self, target: str, **headers: str) -> Answer:
        return await self.request("GET", target, headers=headers)

    async def generate(self, model: str | None, **fields: object) -> Answer:
        body = json.dumps({"model": model, "prompt": [1, 2, 3], **fields}).encode()
        return await self.request("POST", "/v1/completions", body=body)

    async def until_up(self, count: int) -> None:
        """Wait until this many replicas are in rotation."""
        fleet = self.deps.fleet
        assert await fleet.changed_until(lambda: len(fleet.up()) == count, 30.0), [
            replica.reason for replica in fleet.replicas
        ]

    async def until_asked(self) -> None:
        """Wait until every replica has been asked once."""
        fleet = self.deps.fleet

        def asked() -> bool:
            return all(replica.reason != "not asked yet" for replica in fleet.replicas)

        assert await fleet.changed_until(asked, 30.0)

    def in_flight(self) -> list[int]:
        return [replica.in_flight for replica in self.deps.fleet.replicas]

    def outstanding(self) -> list[float]:
        return [replica.outstanding for replica in self.deps.fleet.replicas]


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds, looking often. For what tells nobody when it changes."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


class Harness:
    """Starts things and stops them."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Harness:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def replica(self, stand_in: StandIn | None = None) -> StandIn:
        started = stand_in or StandIn()
        await started.start()
        self._stack.push_async_callback(started.stop)
        return started

    async def replicas(self, count: int, *ready: str) -> list[StandIn]:
        return [await self.replica(StandIn(ready=set(ready))) for _ in range(count)]

    async def proxy(
        self,
        *replicas: StandIn,
        client_tls: ssl.SSLContext | None = None,
        expect_up: int | None = None,
        **settings: Any,
    ) -> Proxy:
        """Start a proxy in front of these and wait until the healthy ones are in rotation."""
        given: dict[str, Any] = {
            "poll_s": 0.05,
            "adapter_wait_s": 2.0,
            "control_timeout_s": 1.0,
            "shutdown_s": 1.0,
            "slow_start_s": 0.0,
        }
        config = ProxyConfig(
            replicas=tuple(Origin.parse(replica.url) for replica in replicas),
            port=0,
            **(given | settings),
        )
        server = Server(config, deps=build_deps(config))
        task = asyncio.create_task(server.serve())
        self._stack.push_async_callback(_stop, server, task)
        await server.ready.wait()
        port = server.servers[0].sockets[0].getsockname()[1]
        proxy = Proxy(config, server.deps, port, server, client_tls)
        healthy = sum(replica.healthy for replica in replicas)
        if expect_up is not None or config.bucket is None:  # a bucket may hold any number
            await proxy.until_up(healthy if expect_up is None else expect_up)
        await proxy.until_asked()
        return proxy


async def _stop(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    server.should_exit = True
    await task

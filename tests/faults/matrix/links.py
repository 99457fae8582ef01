"""Links between two processes that fail on command, and tell what passes.

``RawLink`` forwards bytes; ``HttpLink`` forwards HTTP requests one by one and shows each of them to
its observer, before its last byte is passed on and again with its answer. One link stands before
one process, so that a fault hits that process's way and no other's.

A cut is one as a network makes it: nothing is refused and nothing is closed, bytes just do not
arrive. When it ends, connections that wanted to send meanwhile are reset, as by a router that
forgot them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11

T = TypeVar("T")

CHUNK = 65536
LINE_BYTES = 2**22

Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Network:
    """The event loop of all links, in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="links", daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for it. From other threads."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def listen(self, accepted: Accepted) -> int:
        """Listen on a free port of 127.0.0.1; returns it."""
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=LINE_BYTES)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # aborted transports close in the loop's next rounds


class RawLink:
    """Listens on ``port`` of 127.0.0.1 and forwards to ``target``, another port of it."""

    def __init__(self, network: Network, target: int, *, latency_s: float = 0.0) -> None:
        self._network = network
        self._target = target
        self.latency_s = latency_s
        """Before every answer."""
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port: int = network.run(network.listen(self._accepted))

    def cut(self) -> None:
        """Let nothing pass."""
        self._network.loop.call_soon_threadsafe(self._passing.clear)

    def mend(self) -> None:
        """Let everything pass again. Whoever wanted to send meanwhile is reset."""
        self._network.loop.call_soon_threadsafe(self._passing.set)

    def reset(self) -> None:
        """Reset the connections that are open now."""
        self._network.run(self._reset())

    async def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        # A broken connection is what links are for; the processes at its ends say so if it matters.
        with suppress(OSError, h11.ProtocolError, asyncio.CancelledError):
            await self._pass()
            await self._serve(reader, writer)
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass(self) -> None:
        if not self._passing.is_set():
            await self._passing.wait()
            raise ConnectionResetError("this connection did not outlive the cut")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.add(far_writer)
        ways = [
            asyncio.ensure_future(self._carry(reader, far_writer, 0.0)),
            asyncio.ensure_future(self._carry(far_reader, writer, self.latency_s)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(far_writer)
            far_writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency_s: float
    ) -> None:
        while data := await reader.read(CHUNK):
            await self._pass()
            await asyncio.sleep(latency_s)
            writer.write(data)
            await writer.drain()


@dataclass
class Request:
    """A whole request."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


class Observer:
    """What sees the requests of a link. This one sees and changes nothing."""

    async def passing(self, link: HttpLink, request: Request) -> None:
        """Half of the request's body has been passed on; the rest follows when this returns."""

    def answered(self, link: HttpLink, request: Request, answer: Answer) -> None:
        """The answer is about to be passed on."""


Refuse = Callable[[Request], Answer | None]


class HttpLink(RawLink):
    """A link that understands HTTP/1.1.

    Args:
        network: Where it runs.
        name: For the observer.
        target: Port behind it.
        observer: Sees all requests.
    """

    def __init__(
        self, network: Network, name: str, target: int, observer: Observer | None = None
    ) -> None:
        self.name = name
        self._observer = observer or Observer()
        self.refuse: Refuse = lambda _request: None
        """Answers instead of the target, if it returns an answer."""
        super().__init__(network, target)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = h11.Connection(h11.SERVER)
        while (request := await self._request(near, reader, writer)) is not None:
            await self._pass()
            answer = self.refuse(request) or await self._forward(request, reader)
            await asyncio.sleep(self.latency_s)
            await self._pass()
            self._observer.answered(self, request, answer)
            await self._answer(near, writer, answer)
            if near.our_state is h11.MUST_CLOSE or near.their_state is h11.MUST_CLOSE:
                return
            near.start_next_cycle()

    async def _request(
        self, near: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Request | None:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = near.next_event()
            if event is h11.NEED_DATA:
                if near.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"")
                    writer.write(near.send(go_on) or b"")
                near.receive_data(await reader.read(CHUNK))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                fields = [f for f in head.headers.raw_items() if f[0].lower() != b"expect"]
                return Request(head.method.decode(), head.target.decode(), fields, bytes(body))
            else:
                return None

    async def _forward(self, request: Request, near_reader: asyncio.StreamReader) -> Answer:
        """Ask the target, on a connection of its own; give up when the client has gone."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.add(far_writer)
        # HTTP/1.1 clients send nothing before the answer: a byte or an end means that it is gone.
        gone = asyncio.ensure_future(near_reader.read(1))
        asked = asyncio.ensure_future(self._ask(request, far_reader, far_writer))
        try:
            await asyncio.wait((gone, asked), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionResetError("the client went away")
            return asked.result()
        finally:
            for task in (gone, asked):
                task.cancel()
            await asyncio.gather(gone, asked, return_exceptions=True)
            self._writers.discard(far_writer)
            far_writer.transport.abort()

    async def _ask(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Answer:
        far = h11.Connection(h11.CLIENT)
        head = h11.Request(method=request.method, target=request.path, headers=request.headers)
        half = len(request.body) // 2
        writer.write(far.send(head) or b"")
        if half:
            writer.write(far.send(h11.Data(data=request.body[:half])) or b"")
        await writer.drain()
        await self._observer.passing(self, request)
        # A fault that began meanwhile is for this request too.
        await self._pass()
        if (answer := self.refuse(request)) is not None:
            return answer
        if request.body[half:]:
            writer.write(far.send(h11.Data(data=request.body[half:])) or b"")
        writer.write(far.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _answer_of(far, reader)

    async def _answer(
        self, near: h11.Connection, writer: asyncio.StreamWriter, answer: Answer
    ) -> None:
        head = h11.Response(status_code=answer.status, headers=answer.headers)
        writer.write(near.send(head) or b"")
        if answer.body:
            writer.write(near.send(h11.Data(data=answer.body)) or b"")
        writer.write(near.send(h11.EndOfMessage()) or b"")
        await writer.drain()


async def _answer_of(far: h11.Connection, reader: asyncio.StreamReader) -> Answer:
    answer: Answer | None = None
    body = bytearray()
    while True:
        event = far.next_event()
        if event is h11.NEED_DATA:
            far.receive_data(await reader.read(CHUNK))
        elif isinstance(event, h11.Response):
            answer = Answer(event.status_code, list(event.headers.raw_items()))
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert answer is not None
            answer.body = bytes(body)
            return answer
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the target went away before its answer")

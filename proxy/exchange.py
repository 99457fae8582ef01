"""One request to a replica and its answer, told by callbacks.

A request is repeated here in one case only: a *reused* connection ended before the first byte,
which is how a server's idle timeout looks from outside.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from bucket_lora_proxy.connection import Connection
from bucket_lora_proxy.errors import ConnectFailed, Headers, NoResponse, UpstreamError

if TYPE_CHECKING:
    from bucket_lora_proxy.upstream import Pool


class Consumer(Protocol):
    """Whoever wants an answer. Called by the loop, so neither method may raise."""

    def received(self) -> None:
        """There is more of it: its head, bytes of its body, or its end."""

    def failed(self, error: UpstreamError) -> None:
        """There will be no (whole) answer; the exchange is over."""


class Exchange:
    """A request on its way, and its answer. ``Pool.begin`` makes it.

    Whoever began it has to ``close`` it, after ``failed`` too.
    """

    def __init__(
        self, pool: Pool, head: bytes, body: bytes, *, timeout_s: float, consumer: Consumer
    ) -> None:
        self._pool = pool
        self._head, self._body = head, body
        self._timeout_s = timeout_s
        self._consumer = consumer
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reused = False
        self._closed = False

    # --- the answer; the first three only after `received` ---

    @property
    def status(self) -> int:
        return self._open().status

    @property
    def headers(self) -> Headers:
        """Fields of the answer, names in lower case."""
        return self._open().headers

    @property
    def complete(self) -> bool:
        """The whole answer has arrived; a last part of it may still wait to be taken."""
        return self._open().complete

    def take(self) -> bytes:
        """Bytes of the body that have arrived since."""
        return self._open().take()

    def hold(self, held: bool) -> None:
        """Read no more of the answer for now, or read on."""
        if self._connection is not None:
            self._connection.hold(held)

    def close(self) -> None:
        """Give the connection back, or abort it if the answer is not complete. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._connecting is not None:
            self._stop_connecting(self._connecting)
        self._pool.end(self, self._connection)

    def _open(self) -> Connection:
        if self._connection is None:
            raise RuntimeError("the exchange has no answer yet, or it was closed")
        return self._connection

    # --- what the pool calls ---

    def start(self) -> None:
        """A place in the pool is free."""
        connection = self._pool.take_idle()
        if connection is None:
            self._start_connecting()
        else:
            self._reused = True
            self._send(connection)

    def give_up(self, error: UpstreamError) -> None:
        """End it before its request was sent; its consumer hears of it in a later turn."""
        if self._connecting is not None:
            self._stop_connecting(self._connecting)
        asyncio.get_running_loop().call_soon(self._fail, error)

    def _fail(self, error: UpstreamError) -> None:
        if not self._closed:
            self._consumer.failed(error)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self._pool.active.add(connection)
        connection.begin(self._head, self._body, timeout_s=self._timeout_s, listener=self._listen)

    def _start_connecting(self) -> None:
        self._pool.connecting.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def _stop_connecting(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._connected()

    def _connected(self) -> None:
        self._connecting = None
        self._pool.connecting.discard(self)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect()
        except ConnectFailed as error:
            self._connected()
            self._fail(error)
        else:
            self._connected()
            self._send(connection)

    def _listen(self) -> None:
        connection = self._connection
        if self._closed or connection is None:
            return
        error = connection.error
        if error is None:
            self._consumer.received()
        elif self._reused and isinstance(error, NoResponse):
            self._reused = False
            self._connection = None
            self._pool.discard(connection)
            self._pool.drop_idle()  # the others are as old or older; ask on a fresh one
            self._start_connecting()
        else:
            self._consumer.failed(error)

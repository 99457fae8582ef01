"""Cancels what is being done for a client as soon as the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from bucket_lora_proxy.errors import ClientGone, Headers
from starlette.types import Receive, Scope

CLIENT_CONNECTION = "bucket_lora_proxy.client_connection"
"""Key in the ASGI scope of the connection that a request came on, if the server gives it."""


class ClientConnection(Protocol):
    """What the server's protocol can do beside ASGI, in less time.

    Waiting for a disconnect with ``receive`` takes a task of its own, and an answer in two messages
    two writes: each costs a tenth of all that the proxy does for a request.
    """

    on_lost: Callable[[], None] | None
    """Called when the client leaves; one request at a time sets it."""

    @property
    def body_is_complete(self) -> bool:
        """Whether the next ``receive`` returns the rest of the request body without waiting."""

    def respond(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole answer at once. Returns ``False``, with nothing sent, if it has to wait."""

    def cut(self) -> None:
        """Close inside an answer, which can then not be taken for complete."""


class CancelOnDisconnect:
    """Async context manager: the block is cancelled when the client disconnects.

    Use it once the request body has been received. The block then ends with ``ClientGone``; every
    upstream connection in it is closed on the way out, which is what makes a server stop.
    """

    def __init__(self, receive: Receive, scope: Scope | None = None) -> None:
        self._receive = receive
        self._connection: ClientConnection | None = (scope or {}).get(CLIENT_CONNECTION)
        self._gone = False
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CancelOnDisconnect:
        self._task = asyncio.current_task()
        if self._connection is not None:
            self._connection.on_lost = self._lost
        else:
            self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._lost()

    def _lost(self) -> None:
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.on_lost = None
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and self._task is not None:
            last = self._task.uncancel() == 0
            if last and (kind is None or issubclass(kind, asyncio.CancelledError)):
                raise ClientGone from None

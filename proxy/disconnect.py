"""Cancels what is being done for a client as soon as the client leaves."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from bucket_lora_proxy.errors import ClientGone


class CancelOnDisconnect:
    """Async context manager: the block is cancelled when the client disconnects.

    Use it once the request body has been received. The block then ends with ``ClientGone``; every
    upstream connection in it is closed on the way out, which is what makes a server stop.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CancelOnDisconnect:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and self._task is not None:
            last = self._task.uncancel() == 0
            if last and (kind is None or issubclass(kind, asyncio.CancelledError)):
                raise ClientGone from None

"""uvicorn's HTTP protocol, with limits on the head of a request.

uvicorn bounds neither the size of a head nor the time it may take, so one slow or endless client
could hold a connection, and memory, for ever. Builds on ``HttpToolsProtocol``'s callbacks (uvicorn
0.53 and 0.54); can go once uvicorn has such limits for its httptools protocol.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Largest request head: line and fields."""

HEAD_TIMEOUT_S = 20.0
"""Longest time from the first byte of a head, or from the connection, to its end."""


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too large or too slow; drops trailer fields."""

    head_timeout_s = HEAD_TIMEOUT_S
    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request head is above {MAX_HEAD_BYTES} bytes.")
        elif self._head_bytes and self._head_timer is None:  # most heads come in one piece
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer must not pass for a field that was checked before the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

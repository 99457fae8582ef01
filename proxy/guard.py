"""uvicorn's HTTP protocol, with limits on the head of a request, and word of a client that leaves.

uvicorn bounds neither the size of a head nor the time it may take, so one slow or endless client
could hold a connection, and memory, for ever. Builds on ``HttpToolsProtocol``'s callbacks (uvicorn
0.34 to 0.54); can go once uvicorn has such limits for its httptools protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from bucket_lora_proxy.disconnect import CLIENT_CONNECTION
from bucket_lora_proxy.errors import Headers
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Largest request head: line and fields."""

HEAD_TIMEOUT_S = 20.0
"""Longest time from the first byte of a head, or from the connection, to its end."""


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections whose request head is too large or too slow; drops trailer fields.

    It is the ``ClientConnection`` of its requests.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    on_lost: Callable[[], None] | None = None

    @property
    def body_is_complete(self) -> bool:
        return not self.cycle.more_body and not self.pipeline

    def respond(self, status: int, headers: Headers, body: bytes) -> bool:
        """Do what uvicorn does with the two messages of a whole answer, in one write.

        Args:
            status: of the answer.
            headers: with a Content-Length, unless the status forbids a body; none of it unchecked
                by a parser.
            body: the whole body.
        """
        cycle = self.cycle
        if self.pipeline or self.flow.write_paused:  # `cycle` is that of the newest request
            return False
        if cycle.response_started or cycle.disconnected:
            return False
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def cut(self) -> None:
        """Close inside an answer, without uvicorn's complaint that it was not ended."""
        if not self.pipeline:
            self.cycle.disconnected = True
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._arm()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request head is above {MAX_HEAD_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer must not pass for a field that was checked before the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        cast(dict[str, object], self.scope)[CLIENT_CONNECTION] = self
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

"""uvicorn's HTTP protocol, with limits on what a client may send and how long it may take.

uvicorn bounds neither the size of a head nor the time it may take, nor for how long a client may
leave its answers unread, so one slow or endless client could hold a connection, and memory, for
ever. And it starts and stops a timer for each request, where one that looks again when it is due
does. Builds on ``HttpToolsProtocol``'s callbacks (uvicorn 0.53 and 0.54); can go once uvicorn has
such limits for its httptools protocol.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes in a row that bring nothing of a body: a head, chunk extensions or trailers. The
parser keeps a field until its end."""

HEAD_TIMEOUT_S = 20.0
"""Longest time from the first byte of a head, or from the connection, to its end."""


STALL_S = 120.0
"""Longest time in which a client takes nothing of what waits for it: its generation holds a place
at a replica. Above a pause of its process for garbage or a checkpoint."""

_NO_UPGRADE = "No upgrade is served; send the request without an Upgrade field."


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections whose head or trailers are too large or too slow, that idle, or whose
    client does not read; drops trailer fields; upgrades to nothing.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    stall_s = STALL_S
    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_since: float | None = None
    """Loop time; ``None`` while there is a request."""
    _stall_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_stall()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        HttpToolsProtocol.data_received(self, data)  # `super()` takes longer than the call
        if not self._head_bytes or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"More than {MAX_HEAD_BYTES} bytes of head, or without a body.")
        elif self._in_head and self._head_timer is None:  # most heads come in one piece
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer must not pass for a field that was checked before the body
            HttpToolsProtocol.on_header(self, name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._in_head = False
        self._idle_since = None
        self._disarm()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        HttpToolsProtocol.on_message_complete(self)
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _unset_keepalive_if_required(self) -> None:
        if self._in_head:  # the rest of a body whose request is answered is no sign of life
            self._idle_since = None

    def _unsupported_upgrade_warning(self) -> None:
        """The parser takes whatever follows the head for another protocol, so it is lost.

        A body that comes with the next piece would even be parsed as a request.
        """
        fields = dict(self.headers)
        if b"transfer-encoding" in fields or fields.get(b"content-length", b"0") != b"0":
            self.send_400_response(_NO_UPGRADE)
        else:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _watch_stall(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return  # the end of its answer starts it again
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)
        else:
            self.timeout_keep_alive_handler()

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

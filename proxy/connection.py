"""One HTTP/1.1 connection to a replica. Knows nothing of pools, retries or replicas.

A connection carries one exchange at a time: a request is written, and a listener is called whenever
more of the answer is there. httptools (llhttp) parses. There is no task and no future here: each
costs as much as the parsing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from bucket_lora_proxy.errors import (
    BodyCut,
    GivenUp,
    Headers,
    NoResponse,
    ProtocolFault,
    UpstreamError,
    UpstreamTimeout,
)
from bucket_lora_proxy.outbox import Outbox

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes in a row that bring nothing of a body: a head, interim answers, chunk extensions or
trailers. vLLM's heads are below 1 KiB."""

HIGH_WATER_BYTES = 256 * 1024
"""Body bytes that nobody takes at which reading from the socket stops."""


def _nobody() -> None:
    """Listens while there is no exchange."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream connection.

    Args:
        loop: the running loop.
        peer: how errors name the other end.
        outbox: says when requests are written.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: str, outbox: Outbox | None = None
    ) -> None:
        self.peer = peer
        self.status = 0
        self.headers: Headers = []
        self.head_done = False
        """Status and fields of the (final) answer are there."""
        self.complete = False
        """The whole answer has been parsed (parts of it may still wait to be taken)."""
        self.error: UpstreamError | None = None
        """Why there will be no whole answer."""
        self._idle_since = 0.0
        self._loop = loop
        self._listener: Callable[[], None] = _nobody
        self._outbox = outbox or Outbox()
        self._unsent = b""
        """A request that is still to be written."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._closed = False
        self._spoiled = False
        """Something makes the next exchange on this connection unsafe."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._paused = False
        self._held = False
        self._timeout_s = 0.0
        self._last_byte = 0.0
        self._reset()
        self.complete = True

    def _reset(self) -> None:
        self.status = 0
        self.headers = []
        self.head_done = self.complete = False
        self.error = None
        self._overhead_bytes = 0
        self._got_bytes = False
        self._framed = False
        self._chunks: list[bytes] = []
        self._buffered = 0

    # --- what the pool uses ---

    @property
    def reusable(self) -> bool:
        """Whether another exchange may start here."""
        return self.complete and not (self._closed or self._spoiled or self.error)

    def begin(
        self, head: bytes, body: bytes, *, timeout_s: float, listener: Callable[[], None]
    ) -> None:
        """Send a request on a connection that is ``reusable`` (a new one is).

        Args:
            head: request line and fields, with the empty line.
            body: the whole body.
            timeout_s: longest silence of the peer, until the end of the answer.
            listener: called when there is more of the answer, or ``error`` says why there is not:
                ``NoResponse`` (ended before the first byte), ``GivenUp`` (by this side, then),
                ``BodyCut`` (ended inside the answer), ``ProtocolFault`` (not valid HTTP/1.1) or
                ``UpstreamTimeout``.
        """
        assert self._transport is not None
        self._reset()
        self._listener = listener
        self._timeout_s = timeout_s
        self._last_byte = self._loop.time()
        self._watch_silence(timeout_s)
        if len(body) < HIGH_WATER_BYTES:
            self._unsent = head + body
            self._outbox.add(self._send)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def _send(self) -> None:
        data, self._unsent = self._unsent, b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def take(self) -> bytes:
        """Body bytes that have arrived and were not taken before."""
        chunks = self._chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        self._regulate()
        return data

    def hold(self, held: bool) -> None:
        """Read no more from the peer, because whoever gets it is slow; or read on."""
        self._held = held
        self._regulate()

    def detach(self) -> None:
        """Nobody listens to this exchange any more."""
        self._listener = _nobody
        self._idle_since = self._loop.time()
        if self._held:
            self.hold(False)

    def idle_s(self) -> float:
        """For how long nobody has listened."""
        return self._loop.time() - self._idle_since

    def abort(self) -> None:
        """Close at once, whatever is going on: the peer sees that nobody listens any more."""
        self._spoiled = True
        self._stop_timer()
        if self._transport is not None and not self._closed:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """Abort, and let whoever waits for this exchange see why, in a later turn of the loop."""
        kind = BodyCut if self._got_bytes else GivenUp
        if self._set_error(kind(f"{self.peer}: {reason}")):
            self._loop.call_soon(self._listener)
        self.abort()

    def _set_error(self, error: UpstreamError) -> bool:
        if self.complete or self.error is not None:
            return False
        self.error = error
        return True

    def _regulate(self) -> None:
        pause = self._held or self._buffered > HIGH_WATER_BYTES
        if pause == self._paused or self._transport is None or self._closed:
            return
        self._paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _watch_silence(self, timeout_s: float) -> None:
        """Look again in so many seconds. A timer outlives its exchange: most need no new one."""
        due = self._loop.time() + timeout_s
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_s, self._check_silence)
        self._timer_due = due

    def _check_silence(self) -> None:
        self._timer = None
        if self.complete or self.error is not None:
            return
        left = self._last_byte + self._timeout_s - self._loop.time()
        if self._paused:
            left = self._timeout_s  # our own consumer is slow, not the peer
        if left > 0:
            self._watch_silence(left)
            return
        self._spoiled = True
        self._set_error(UpstreamTimeout(f"{self.peer}: no byte for {self._timeout_s:g} s"))
        self._listener()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete or self._unsent:
            self.abort()  # bytes that answer no request: nothing here can be trusted any more
            return
        self._got_bytes = True
        self._last_byte = self._loop.time()
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoiled = True
            self._set_error(ProtocolFault(f"{self.peer}: not an HTTP/1.1 answer ({error})"))
        if self._overhead_bytes > MAX_HEAD_BYTES and not self.complete:
            # Counted here and not by field: the parser collects a field until its end.
            self._set_error(ProtocolFault(f"{self.peer}: {MAX_HEAD_BYTES} bytes without any body"))
            self.abort()
        if self.head_done or self.error is not None:
            self._listener()  # once for all that came together

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._stop_timer()
        if self.complete:
            return
        cause = f" ({exc})" if exc is not None else ""
        if not self._got_bytes:
            self._set_error(NoResponse(f"{self.peer}: closed before the first byte{cause}"))
        else:
            self._set_error(BodyCut(f"{self.peer}: closed inside the answer{cause}"))
        self._listener()

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self.complete:
            self._spoiled = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # trailers are dropped: no field of a generation is carried there
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._framed = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete or self.error is not None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = []
            self._framed = False
            return  # interim answer; the final one follows
        if not 200 <= status < 600:
            self._set_error(ProtocolFault(f"{self.peer}: answered with status {status}"))
        elif not self._framed and status not in (204, 304):
            # Its end would be that of the connection, and so would be that of a part of it.
            self._set_error(ProtocolFault(f"{self.peer}: answered without saying how long"))
        self.status = status
        self.head_done = True

    def on_body(self, body: bytes) -> None:
        if self.complete or not body:
            return
        self._overhead_bytes = 0
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER_BYTES:
            self._regulate()

    def on_message_complete(self) -> None:
        if self.head_done and not self.complete and self.error is None:
            if not self._parser.should_keep_alive():
                self._spoiled = True
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._spoiled = True  # answered before it took the whole request

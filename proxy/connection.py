"""One HTTP/1.1 connection to a replica. Knows nothing of pools, retries or replicas.

A connection carries one exchange at a time: write a request, wait for the head of the answer, take
the body piece by piece. httptools (llhttp) parses; reading is paused while the consumer is behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
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

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes in a row that bring nothing of a body: a head, interim answers, chunk extensions or
trailers. vLLM's heads are below 1 KiB."""

HIGH_WATER_BYTES = 256 * 1024
"""Unread body bytes at which reading from the socket stops."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream connection.

    Args:
        loop: the running loop.
        peer: how errors name the other end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: str) -> None:
        self.peer = peer
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        """The whole answer has been parsed (parts of it may still wait to be taken)."""
        self.idle_since = 0.0
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._closed = False
        self._spoiled = False
        """Something makes the next exchange on this connection unsafe."""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._reset()
        self.complete = True

    def _reset(self) -> None:
        self.status = 0
        self.headers = []
        self.complete = False
        self._overhead_bytes = 0
        self._head_done = False
        self._got_bytes = False
        self._until_close = True
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._error: UpstreamError | None = None
        self._timeout_s = 0.0
        self._last_byte = 0.0

    # --- what the pool uses ---

    @property
    def reusable(self) -> bool:
        """Whether another exchange may start here."""
        return self.complete and not (self._closed or self._spoiled or self._error)

    async def exchange(self, head: bytes, body: bytes, *, timeout_s: float) -> None:
        """Send a request and wait for the head of its (final) answer.

        Args:
            head: request line and fields, with the empty line.
            body: the whole body.
            timeout_s: longest silence of the peer, now and later inside the body.

        Raises:
            NoResponse: the connection ended before the first byte.
            GivenUp: this side ended it then, with ``fail``.
            BodyCut: it ended inside the head.
            ProtocolFault: the answer is not valid HTTP/1.1.
            UpstreamTimeout: silence for ``timeout_s``.
        """
        self._reset()
        if self._closed or self._transport is None:
            raise NoResponse(f"{self.peer}: the connection was closed while idle")
        self._timeout_s = timeout_s
        self._last_byte = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._check_silence)
        self._transport.write(head + body if len(body) < HIGH_WATER_BYTES else head)
        if len(body) >= HIGH_WATER_BYTES:
            self._transport.write(body)
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def next_chunk(self) -> bytes:
        """Next piece of the body, or ``b""`` after the last one.

        Raises:
            BodyCut: the connection ended inside the body.
            ProtocolFault, UpstreamTimeout: as for ``exchange``.
        """
        data = await self.peek()
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def peek(self) -> bytes:
        """What ``next_chunk`` would return, without taking it. Raises the same."""
        while not self._chunks:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    def abort(self) -> None:
        """Close at once, whatever is going on: the peer sees that nobody listens any more."""
        self._spoiled = True
        self._stop_timer()
        if self._transport is not None and not self._closed:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """Abort, and let whoever waits for this exchange see why."""
        kind = BodyCut if self._got_bytes else GivenUp
        self._fail(kind(f"{self.peer}: {reason}"))
        self.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self._stop_timer()
        self._wake()

    def _check_silence(self) -> None:
        left = self._last_byte + self._timeout_s - self._loop.time()
        if self._paused:
            left = self._timeout_s  # our own consumer is slow, not the peer
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
            return
        self._timer = None
        self._spoiled = True
        self._fail(UpstreamTimeout(f"{self.peer}: no byte for {self._timeout_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.abort()  # bytes that answer no request: nothing here can be trusted any more
            return
        self._got_bytes = True
        self._last_byte = self._loop.time()
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoiled = True
            if not self.complete:
                self._fail(ProtocolFault(f"{self.peer}: not an HTTP/1.1 answer ({error})"))
        if self._overhead_bytes > MAX_HEAD_BYTES and not self.complete:
            # Counted here and not by field: the parser collects a field until its end.
            self._fail(ProtocolFault(f"{self.peer}: {MAX_HEAD_BYTES} bytes without any body"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self.complete:
            return
        cause = f" ({exc})" if exc is not None else ""
        if not self._got_bytes:
            self._fail(NoResponse(f"{self.peer}: closed before the first byte{cause}"))
        elif self._head_done and self._until_close and exc is None:
            self._finish()
        else:
            self._fail(BodyCut(f"{self.peer}: closed inside the answer{cause}"))

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self.complete:
            self._spoiled = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # trailers are dropped: no field of a generation is carried there
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._until_close = False
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete or self._error is not None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = []
            self._until_close = True
            return  # interim answer; the final one follows
        self.status = status
        self._head_done = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self.complete or not body:
            return
        self._overhead_bytes = 0
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._head_done and not self.complete and self._error is None:
            if not self._parser.should_keep_alive():
                self._spoiled = True
            self._finish()

    def _finish(self) -> None:
        self.complete = True
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._spoiled = True  # answered before it took the whole request
        self._stop_timer()
        self._wake()

"""The HTTP client of one replica: a bounded pool of keep-alive connections. Owns no policy.

A general client costs more than everything else the proxy does (see docs/decisions), so this one
does only what forwarding needs: whole request bodies out, streamed answers in, no redirects, no
cookies, no decompression, no proxies. It calls back (``begin``); ``request`` is the same to await.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from bucket_lora_proxy.connection import Connection
from bucket_lora_proxy.errors import ConnectFailed, Headers, UpstreamTimeout
from bucket_lora_proxy.exchange import Consumer, Exchange
from bucket_lora_proxy.origin import Origin as Origin
from bucket_lora_proxy.outbox import Outbox
from bucket_lora_proxy.response import Response


class Pool:
    """Connections to one origin.

    Args:
        origin: where to connect.
        limit: most connections at once; further requests wait for one.
        keep_alive_s: longest idle time after which a connection is still reused. Below the
            5 s after which uvicorn, and so vLLM, closes idle connections.
        connect_timeout_s: limit of one connect, TLS handshake included.
        token: bearer token to send, if any.
        tls: context for an https origin.
        outbox: says when requests are written; by default at once.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        limit: int,
        keep_alive_s: float,
        connect_timeout_s: float,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.origin = origin
        self._outbox = outbox or Outbox()
        self.active: set[Connection] = set()
        """Connections with an exchange."""
        self.connecting: set[Exchange] = set()
        """Exchanges that have a place and no connection yet."""
        self._keep_alive_s = keep_alive_s
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls if origin.tls else None
        self._free = limit
        self._waiting: deque[Exchange] = deque()
        """Exchanges for which there is no place yet, in their order."""
        self._idle: list[Connection] = []
        self._fixed = b" HTTP/1.1\r\nhost: " + origin.authority + b"\r\n"
        if token is not None:
            self._fixed += b"authorization: Bearer " + token.encode() + b"\r\n"

    def begin(
        self,
        method: bytes,
        target: bytes,
        *,
        timeout_s: float,
        consumer: Consumer,
        headers: Headers | None = None,
        body: bytes = b"",
    ) -> Exchange:
        """Send a request, at once if a connection is idle; the consumer hears of what comes back.

        Args:
            method: e.g. ``b"POST"``.
            target: path and query, starting with ``/``.
            timeout_s: longest silence of the replica, up to the head and inside the body.
            consumer: is not called before this returns.
            headers: fields besides Host, Authorization and framing.
            body: the whole body.
        """
        parts = [method, b" ", self.origin.base_path, target, self._fixed]
        for name, value in headers or ():
            parts += (name, b": ", value, b"\r\n")
        if body or method == b"POST":
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        exchange = Exchange(self, b"".join(parts), body, timeout_s=timeout_s, consumer=consumer)
        if self._free:
            self._free -= 1
            exchange.start()
        else:
            self._waiting.append(exchange)
        return exchange

    async def request(
        self,
        method: bytes,
        target: bytes,
        *,
        timeout_s: float,
        headers: Headers | None = None,
        body: bytes = b"",
    ) -> Response:
        """Send a request and return once the head of the answer is here. Args as for ``begin``.

        Raises:
            ConnectFailed: nothing was sent.
            NoResponse: sent on a fresh connection, which ended before the first byte.
            GivenUp: sent, and ended by ``fail_active`` before the first byte.
            BodyCut, ProtocolFault, UpstreamTimeout: the answer failed.
        """
        response = Response(self.origin.url)
        exchange = self.begin(
            method, target, timeout_s=timeout_s, consumer=response, headers=headers, body=body
        )
        await response.head_of(exchange)
        return response

    async def fetch(
        self,
        method: bytes,
        target: bytes,
        *,
        timeout_s: float,
        max_bytes: int,
        headers: Headers | None = None,
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """Send a request and return status and body. ``timeout_s`` is for all of it: a place in the
        pool, the connect, and an answer that comes drop by drop. Other args as for ``begin``.

        Raises:
            UpstreamError: there is no whole answer, or it is above ``max_bytes``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.request(
                    method, target, timeout_s=timeout_s, headers=headers, body=body
                )
                with response:
                    return response.status, await response.read(max_bytes=max_bytes)
        except TimeoutError:
            raise UpstreamTimeout(
                f"{self.origin.url}: no whole answer within {timeout_s:g} s"
            ) from None

    # --- what an exchange calls ---

    def take_idle(self) -> Connection | None:
        """The connection that was used last, if it may be used again."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_s() <= self._keep_alive_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """Open a connection.

        Raises:
            ConnectFailed: it was refused, or took too long.
        """
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, origin.url, self._outbox),
                    origin.host,
                    origin.port,
                    ssl=self._tls,
                    server_hostname=origin.tls_name if self._tls is not None else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(
                f"{origin.url}: no connection within {self._connect_timeout_s:g} s"
            ) from error
        except (OSError, ValueError) as error:  # ssl.SSLError; a host that is no name
            raise ConnectFailed(f"{origin.url}: cannot connect: {error}") from error
        return connection

    def end(self, exchange: Exchange, connection: Connection | None) -> None:
        """Take back what the exchange had, and let the next one go."""
        if connection is None and exchange in self._waiting:
            self._waiting.remove(exchange)
            return
        if connection is not None:
            self.discard(connection)
        if self._waiting:
            self._waiting.popleft().start()
        else:
            self._free += 1

    def discard(self, connection: Connection) -> None:
        """Keep a connection for the next exchange, or close it if that is not safe."""
        self.active.discard(connection)
        connection.detach()
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    # --- what the replica's owner calls ---

    def drop_idle(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def fail_active(self, reason: str) -> None:
        """End every exchange in progress with an error, as if the replica had gone away."""
        for connection in list(self.active):
            connection.fail(reason)
        for exchange in [*self.connecting, *self._waiting]:
            exchange.give_up(ConnectFailed(f"{self.origin.url}: {reason}"))

    def close(self) -> None:
        """Close all connections; exchanges in progress fail."""
        self.drop_idle()
        self.fail_active("the proxy is stopping")

"""The HTTP client of one replica: a bounded pool of keep-alive connections. Owns no policy.

A general client costs more than everything else the proxy does (see docs/decisions), so this one
does only what forwarding needs: whole request bodies out, streamed answers in, no redirects, no
cookies, no decompression, no proxies. A request is repeated here in one case only: a *reused*
connection ended before the first byte, which is how a server's idle timeout looks from outside.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from bucket_lora_proxy.connection import Connection
from bucket_lora_proxy.errors import AnswerTooLarge, BodyCut, ConnectFailed, Headers, NoResponse

from adapter_bucket.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a replica listens."""

    url: str
    host: str
    port: int
    tls: bool
    authority: bytes
    """Value of the Host field."""
    base_path: bytes
    """Prefix of every path, without a trailing slash; usually empty."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read ``http(s)://host[:port][/prefix]``.

        Raises:
            ConfigError: any other form; credentials in a URL are refused because URLs are logged.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"replica URL {url!r} is not valid: {error}") from error
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "a replica URL holds credentials; give them as --replica-token-file instead"
            )
        wrong_parts = parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or wrong_parts:
            raise ConfigError(f"replica URL {url!r} is not http(s)://host[:port][/prefix]")
        if not url.isascii() or any(character <= " " for character in url):
            raise ConfigError(f"replica URL {url!r} holds characters other than printable ASCII")
        tls = parts.scheme == "https"
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port or (443 if tls else 80),
            tls=tls,
            authority=parts.netloc.encode(),
            base_path=parts.path.rstrip("/").encode(),
        )


class Response:
    """An answer whose head has arrived. Use as a context manager; leaving it early cancels."""

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection: Connection | None = connection
        self._pool = pool

    async def next_chunk(self) -> bytes:
        """Next piece of the body, ``b""`` after the last. Raises ``UpstreamError``s."""
        if self._connection is None:
            raise BodyCut(f"{self._pool.origin.url}: the answer was closed")
        return await self._connection.next_chunk()

    async def peek(self) -> bytes:
        """First piece of the body without taking it. Raises ``UpstreamError``s."""
        if self._connection is None:
            raise BodyCut(f"{self._pool.origin.url}: the answer was closed")
        return await self._connection.peek()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while chunk := await self.next_chunk():
            yield chunk

    async def read(self, *, max_bytes: int) -> bytes:
        """The whole body.

        Raises:
            AnswerTooLarge: it is larger than ``max_bytes``.
            BodyCut, ProtocolFault, UpstreamTimeout: it did not arrive.
        """
        parts: list[bytes] = []
        size = 0
        while chunk := await self.next_chunk():
            parts.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise AnswerTooLarge(f"{self._pool.origin.url}: answer above {max_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or abort it if the answer is not complete. Idempotent."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._pool.release(connection)

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
    ) -> None:
        self.origin = origin
        self._keep_alive_s = keep_alive_s
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls if origin.tls else None
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []
        self._active: set[Connection] = set()
        self._fixed = b"host: " + origin.authority + b"\r\n"
        if token is not None:
            self._fixed += b"authorization: Bearer " + token.encode() + b"\r\n"

    async def request(
        self,
        method: bytes,
        target: bytes,
        *,
        timeout_s: float,
        headers: Headers | None = None,
        body: bytes = b"",
    ) -> Response:
        """Send a request and return once the head of the answer is here.

        Args:
            method: e.g. ``b"POST"``.
            target: path and query, starting with ``/``.
            timeout_s: longest silence of the replica, up to the head and inside the body.
            headers: fields besides Host, Authorization and framing.
            body: the whole body.

        Raises:
            ConnectFailed: nothing was sent.
            NoResponse: sent on a fresh connection, which ended before the first byte.
            GivenUp: sent, and ended by ``fail_active`` before the first byte.
            BodyCut, ProtocolFault, UpstreamTimeout: the answer failed.
        """
        parts = [method, b" ", self.origin.base_path, target, b" HTTP/1.1\r\n", self._fixed]
        for name, value in headers or ():
            parts += (name, b": ", value, b"\r\n")
        if body or method == b"POST":
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        head = b"".join(parts)
        await self._slots.acquire()
        try:
            return Response(await self._exchange(head, body, timeout_s), self)
        except BaseException:
            self._slots.release()
            raise

    async def _exchange(self, head: bytes, body: bytes, timeout_s: float) -> Connection:
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._on(connection, head, body, timeout_s)
            except NoResponse:
                self.drop_idle()  # the others are as old or older; ask on a fresh one
        return await self._on(await self._connect(), head, body, timeout_s)

    async def _on(
        self, connection: Connection, head: bytes, body: bytes, timeout_s: float
    ) -> Connection:
        self._active.add(connection)
        try:
            await connection.exchange(head, body, timeout_s=timeout_s)
        except BaseException:
            self._active.discard(connection)
            connection.abort()
            raise
        return connection

    def _take_idle(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._keep_alive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, origin.url),
                    origin.host,
                    origin.port,
                    ssl=self._tls,
                    server_hostname=origin.host if self._tls is not None else None,
                )
        except TimeoutError as error:
            raise ConnectFailed(
                f"{origin.url}: no connection within {self._connect_timeout_s:g} s"
            ) from error
        except OSError as error:  # ssl.SSLError is one
            raise ConnectFailed(f"{origin.url}: cannot connect: {error}") from error
        return connection

    def release(self, connection: Connection) -> None:
        """Take a connection back after its exchange."""
        self._slots.release()
        self._active.discard(connection)
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def drop_idle(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def fail_active(self, reason: str) -> None:
        """End every exchange in progress with an error, as if the replica had gone away."""
        for connection in list(self._active):
            connection.fail(reason)

    def close(self) -> None:
        """Close all connections; exchanges in progress fail."""
        self.drop_idle()
        self.fail_active("the proxy is stopping")

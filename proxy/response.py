"""An answer of a replica to wait for, where code reads better than callbacks would."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from bucket_lora_proxy.errors import AnswerTooLarge, BodyCut, Headers, UpstreamError

if TYPE_CHECKING:
    from bucket_lora_proxy.exchange import Exchange


class Response:
    """An answer whose head has arrived. Use as a context manager; leaving it early cancels.

    Args:
        peer: how errors name the replica.
    """

    def __init__(self, peer: str) -> None:
        self.status = 0
        self.headers: Headers = []
        self._peer = peer
        self._exchange: Exchange | None = None
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head_of(self, exchange: Exchange) -> None:
        """Become the answer of an exchange, once its head is there. Raises ``UpstreamError``s."""
        self._exchange = exchange
        try:
            await self._news()
            if self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise
        self.status, self.headers = exchange.status, exchange.headers

    async def next_chunk(self) -> bytes:
        """Next piece of the body, ``b""`` after the last.

        Raises:
            BodyCut: the connection ended inside the body.
            ProtocolFault, UpstreamTimeout: the body is not valid, or did not go on.
        """
        while True:
            if self._exchange is None:
                raise BodyCut(f"{self._peer}: the answer was closed")
            data = self._exchange.take()
            if data or self._exchange.complete:
                return data
            if self._error is not None:
                raise self._error
            await self._news()

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
                raise AnswerTooLarge(f"{self._peer}: answer above {max_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or abort it if the answer is not complete. Idempotent."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what the exchange calls ---

    def received(self) -> None:
        self._wake()

    def failed(self, error: UpstreamError) -> None:
        self._error = error
        self._wake()

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

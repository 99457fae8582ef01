"""What a generation needs of the connection on which it was asked for."""

from __future__ import annotations

from typing import Protocol

from bucket_lora_proxy.errors import ApiError, Headers


class Client(Protocol):
    """The connection on which the request came. Nothing here waits."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    def refuse(self, error: ApiError) -> None:
        """Send an error."""

    def start_stream(self, status: int, headers: Headers) -> None:
        """Begin an answer; its head goes out with its first piece."""

    def stream(self, data: bytes, *, last: bool) -> None:
        """Send a piece of it."""

    def cut(self) -> None:
        """Close inside an answer, which can then not be taken for complete."""

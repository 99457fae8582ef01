"""The state of one request for a generation: uvicorn's, without what only ASGI needs.

To make the scope, the event and the rest took as long as to parse the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from bucket_lora_proxy.errors import Headers
from bucket_lora_proxy.forward import GENERATION_PATHS

_TARGETS = {path.encode(): path for path in GENERATION_PATHS}
"""As all but hostile clients write them."""

_UNUSED = asyncio.Event()
"""uvicorn tells it of news, and nobody waits for them."""


class Phase(Enum):
    """How far the active request is."""

    HEAD = auto()
    """Its head is there and has not been looked at."""
    BODY = auto()
    """It may go on, and its body is being received."""
    ANSWER = auto()
    """It is being answered."""


def generation_path(method: bytes, target: bytes) -> str | None:
    """Which generation a request line asks for, if it does.

    Raises:
        httptools.HttpParserInvalidURLError: the target is no URL.
    """
    if method != b"POST":
        return None
    path = _TARGETS.get(target)
    if path is None:
        path = unquote((httptools.parse_url(target).path or b"").decode("ascii"))
    return path if path in GENERATION_PATHS else None


class Cycle(RequestResponseCycle):
    """All that uvicorn's protocol, and ours, ask of a request in progress."""

    def __init__(
        self,
        path: str,
        http_version: str,
        headers: Headers,
        *,
        expects_100: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
    ) -> None:
        self.path = path
        self.http_version = http_version
        self.headers = headers
        self.parts: list[bytes] = []
        """Of the body."""
        self.size = 0
        """Of the body so far, in bytes."""
        self.waiting_for_100_continue = expects_100
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.message_event = _UNUSED
        self.disconnected = self.response_started = self.response_complete = False
        self.more_body = True

    def take_body(self) -> bytes:
        """The whole body, once it is there."""
        parts, self.parts = self.parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

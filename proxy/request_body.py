"""The request body: received within limits, and the few fields that routing depends on."""

from __future__ import annotations

import asyncio
from typing import Any

from bucket_lora_proxy.errors import ApiError, ClientGone, ErrorType, Headers
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

EXPECTED_DECODE_TOKENS = 512
"""What a completion is taken to need where its limit allows more: most end long before it."""


class Envelope(BaseModel):
    """What the proxy reads of a generation request; the body itself is forwarded byte for byte.

    The whole document is parsed (by the parser behind pydantic, which builds objects for these
    fields only), so a name inside a prompt can never pass for the model. Of a repeated key the
    last one counts, as it does for the server behind.
    """

    model: str | None = None
    prompt: Any = None
    messages: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None

    def content(self) -> object:
        """What the prefix cache is keyed by: the prompt, or the chat messages."""
        return self.prompt if self.prompt is not None else self.messages

    def decode_tokens(self) -> int:
        """Tokens the request is expected to produce."""
        limit = self.max_completion_tokens or self.max_tokens or EXPECTED_DECODE_TOKENS
        return max(0, min(limit, EXPECTED_DECODE_TOKENS)) * max(1, self.n or 1)


def read_envelope(body: bytes) -> Envelope:
    """Parse a request body.

    Raises:
        ApiError: 400, it is not a JSON object in UTF-8, or a field has the wrong type.
    """
    try:
        return Envelope.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(
            400,
            ErrorType.BAD_REQUEST,
            f"the request body is not a valid generation request: {where}: {first['msg']}",
        ) from None


async def receive_body(
    receive: Receive, headers: Headers, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Receive a whole request body.

    Raises:
        ApiError: 413 above ``max_bytes`` (told before the body is read where the client declares
            it), 408 when it takes longer than ``timeout_s``.
        ClientGone: the client left before the end.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    message = await _next(receive, timeout_s)
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(body) <= max_bytes:
        return body
    parts, size = [body], len(body)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while size <= max_bytes and message.get("more_body", False):
        message = await _next(receive, deadline - asyncio.get_running_loop().time())
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


async def _next(receive: Receive, timeout_s: float) -> dict[str, bytes]:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise ApiError(
            408, ErrorType.BODY_TIMEOUT, "the request body did not arrive in time"
        ) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return dict(message)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        ErrorType.BODY_TOO_LARGE,
        f"the request body is above the limit of {max_bytes} bytes; send a smaller one or raise "
        "--max-body-bytes",
    )

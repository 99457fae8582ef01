"""The request body: received within limits, and the few fields that routing depends on."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.types import Receive

from bucket_lora_proxy.errors import ApiError, ClientGone, ErrorType, Headers

EXPECTED_DECODE_TOKENS = 512
"""What a completion is taken to need where its limit allows more: most end long before it."""

MAX_COMPLETIONS = 16_384
"""Completions of one request that are counted: vLLM refuses more. A replica's load is a float, and
a number that is not small beside 2**53 would take the rest of the load with it when it is taken
off again."""


class Envelope(BaseModel):
    """What the proxy reads of a generation request; the body itself is forwarded byte for byte.

    The whole document is parsed, so a name inside a prompt can never pass for the model. Of a
    repeated key the last one counts, as it does for the server behind.
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
        return _decode_tokens(self.max_completion_tokens or self.max_tokens, self.n)


class _Fields(msgspec.Struct):
    """The same, but with the large fields left as the JSON they are."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


_FIELDS = msgspec.json.Decoder(_Fields)


class RoutingFields(NamedTuple):
    """The fields that routing depends on."""

    model: str | None
    content_json: bytes
    """The prompt, or the chat messages, as JSON that is valid but for its strings' encoding."""
    decode_tokens: int
    """Tokens the request is expected to produce."""


def read_fields(body: bytes) -> RoutingFields:
    """Read a request body without building its prompt.

    What the strict parser does not take (a NaN, a number in quotes, a thousand lists inside each
    other) is left to the lenient one, so that it decides what is refused.

    Raises:
        ApiError: as ``read_envelope``.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        envelope = read_envelope(body)
        content = to_json(envelope.content(), inf_nan_mode="constants")
        return RoutingFields(envelope.model, content, envelope.decode_tokens())
    content = bytes(fields.prompt)
    if content == b"null":
        content = bytes(fields.messages)
    limit = fields.max_completion_tokens or fields.max_tokens
    return RoutingFields(fields.model, content, _decode_tokens(limit, fields.n))


def _decode_tokens(limit: int | None, completions: int | None) -> int:
    expected = min(limit or EXPECTED_DECODE_TOKENS, EXPECTED_DECODE_TOKENS)
    return max(0, expected) * min(max(1, completions or 1), MAX_COMPLETIONS)


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
        raise _invalid(f"{where}: {first['msg']}") from None


def read_content(content_json: bytes) -> object:
    """Build a prompt from its JSON.

    Raises:
        ApiError: 400, it is not JSON in UTF-8.
    """
    try:
        return from_json(content_json)
    except ValueError as error:
        raise _invalid(str(error)) from None


def _invalid(why: str) -> ApiError:
    return ApiError(
        400,
        ErrorType.BAD_REQUEST,
        f"the request body is not a valid generation request: {why}",
    )


def check_framing(headers: Headers, *, max_bytes: int) -> None:
    """Decide by the head of a request whether its body can be taken.

    Raises:
        ApiError: 501 for a transfer coding other than chunked (the proxy frames anew, so it would
            be lost), 413 for a declared length above ``max_bytes``.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise too_large(max_bytes)
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            raise ApiError(
                501,
                ErrorType.BAD_REQUEST,
                f"transfer coding {value[:50].decode('latin-1')!r} is not supported; send the body "
                "with a length, or chunked",
            )


async def receive_body(
    receive: Receive, headers: Headers, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Receive a whole request body.

    Args:
        receive: ASGI's.
        headers: of the request.
        max_bytes: largest body.
        timeout_s: longest time until its end.

    Raises:
        ApiError: as ``check_framing``; 413 above ``max_bytes``, 408 after ``timeout_s``.
        ClientGone: the client left before the end.
    """
    check_framing(headers, max_bytes=max_bytes)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and size <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
    except TimeoutError:
        raise too_slow() from None
    if size > max_bytes:
        raise too_large(max_bytes)
    return b"".join(parts)


def too_slow() -> ApiError:
    """The body did not come to its end."""
    return ApiError(408, ErrorType.BODY_TIMEOUT, "the request body did not arrive in time")


def too_large(max_bytes: int) -> ApiError:
    """The body is above the limit."""
    return ApiError(
        413,
        ErrorType.BODY_TOO_LARGE,
        f"the request body is above the limit of {max_bytes} bytes; send a smaller one or raise "
        "--max-body-bytes",
    )

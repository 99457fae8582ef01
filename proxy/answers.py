"""Sending a complete answer over ASGI."""

from __future__ import annotations

import json

from starlette.types import Send

from bucket_lora_proxy.errors import ApiError, Headers


async def send_bytes(send: Send, *, status: int, headers: Headers, body: bytes) -> None:
    """Send one complete answer; the length is added to ``headers``."""
    framed = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": framed})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, document: object, *, status: int = 200) -> None:
    """Send a JSON document."""
    body = json.dumps(document).encode()
    await send_bytes(
        send, status=status, headers=[(b"content-type", b"application/json")], body=body
    )


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error as JSON."""
    await send_bytes(send, status=error.status, headers=error.headers(), body=error.body())

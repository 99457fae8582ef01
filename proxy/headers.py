"""Which header fields cross the proxy, in either direction. Pure.

The proxy frames both of its messages itself, so fields that describe framing or one connection
(RFC 9110 §7.6.1) never cross, nor does anything that ``Connection`` names. Credentials of one side
never reach the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from bucket_lora_proxy.errors import Headers

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"cookie",
    b"x-api-key",
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", b"server", b"date", b"set-cookie", b"alt-svc"}


def for_upstream(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Fields of a client's request that a replica may see. Names must be lower case."""
    return _kept(headers, _NOT_UPSTREAM)


def for_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Fields of a replica's answer that the client may see. Names must be lower case."""
    return _kept(headers, _NOT_DOWNSTREAM)


def is_event_stream(headers: Headers) -> bool:
    """Whether an answer comes in server-sent events. Names must be lower case."""
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    kept: Headers = []
    named: set[bytes] | None = None
    for name, value in headers:
        if name == b"connection":
            named = (named or set()) | {part.strip().lower() for part in value.split(b",")}
        elif name not in dropped:
            kept.append((name, value))
    if named:
        kept = [field for field in kept if field[0] not in named]
    return kept

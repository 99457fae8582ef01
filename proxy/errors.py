"""Every refusal the proxy answers with, and every way an upstream exchange can fail.

Two trees. ``ApiError`` becomes a JSON answer for the client; its ``type`` says what the client can
do. ``UpstreamError`` stays inside: it tells the forwarding code whether another replica may be
asked (nothing of the answer has been delivered to the client in any of these cases).
"""

from __future__ import annotations

import json
from enum import StrEnum


class ErrorType(StrEnum):
    """Wire values of ``error.type``."""

    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    ROUTE_FORBIDDEN = "route_forbidden"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    MODEL_NOT_FOUND = "model_not_found"
    ADAPTER_NOT_READY = "adapter_not_ready"
    ADAPTER_RETIRED = "adapter_retired"
    ADAPTER_REFUSED = "adapter_refused"
    NO_REPLICA = "no_replica"
    REPLICA_FAILED = "replica_failed"
    REPLICA_TIMEOUT = "replica_timeout"
    BROADCAST_FAILED = "broadcast_failed"
    MODELS_DIFFER = "models_differ"
    INTERNAL = "internal"


_RETRYABLE = frozenset(
    {
        ErrorType.ADAPTER_NOT_READY,
        ErrorType.NO_REPLICA,
        ErrorType.REPLICA_FAILED,
        ErrorType.REPLICA_TIMEOUT,
    }
)
"""The same request can succeed later without any change."""

RETRY_AFTER_S = 1
"""What a client is told to wait before it tries again."""

Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """An answer that the proxy gives itself, as JSON.

    Args:
        status: HTTP status of the answer.
        type: what went wrong, for programs.
        message: what went wrong, for people: subject, value, limit, next action.
        retry_after_s: sent as ``Retry-After``.
        details: further fields of the ``error`` object.
    """

    def __init__(
        self,
        status: int,
        type: ErrorType,
        message: str,
        *,
        retry_after_s: int | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def body(self) -> bytes:
        """The JSON document: ``{"error": {message, type, code, retryable, …}}``."""
        error = {
            "message": self.message,
            "type": str(self.type),
            "code": self.status,
            "retryable": self.type in _RETRYABLE,
            **self.details,
        }
        return json.dumps({"error": error}).encode()

    def headers(self) -> Headers:
        """Headers that belong to the answer, framing excluded."""
        headers: Headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
            headers.append((b"www-authenticate", b'Basic realm="bucket-lora-proxy"'))
        if self.status == 408:
            headers.append((b"connection", b"close"))  # what still comes is no request
        return headers


class ClientGone(Exception):
    """The client closed its connection; whatever was done for it has been cancelled."""


class UpstreamError(Exception):
    """An exchange with a replica failed. The message names the replica and the cause."""


class ConnectFailed(UpstreamError):
    """No connection: nothing was sent."""


class NoResponse(UpstreamError):
    """The connection ended before the first byte of an answer."""


class GivenUp(UpstreamError):
    """Sent, and ended by this side before the first byte: the same replica is not asked again."""


class BodyCut(UpstreamError):
    """The connection ended inside an answer."""


class ProtocolFault(UpstreamError):
    """The answer is not HTTP/1.1, or breaks one of the limits."""


class UpstreamTimeout(UpstreamError):
    """No byte arrived within the limit."""


class AnswerTooLarge(UpstreamError):
    """The answer is above the limit for collected answers."""


def gave_up(model: str | None, attempts: int, fault: UpstreamError | None) -> ApiError:
    """What the client is told when no attempt is left."""
    if fault is None:
        return ApiError(
            503,
            ErrorType.ADAPTER_NOT_READY,
            f"model {model!r} was listed as ready but {attempts} replicas did not serve it; it is "
            "being loaded again or was just retired",
            retry_after_s=RETRY_AFTER_S,
        )
    timed_out = isinstance(fault, UpstreamTimeout)
    delivered = "nothing was sent" if isinstance(fault, ConnectFailed) else "no answer came"
    if not isinstance(fault, ConnectFailed | NoResponse | GivenUp | UpstreamTimeout):
        delivered = "the answer was cut"
    return ApiError(
        504 if timed_out else 502,
        ErrorType.REPLICA_TIMEOUT if timed_out else ErrorType.REPLICA_FAILED,
        f"{attempts} attempts failed, last: {fault} ({delivered}); the request can be sent again",
        retry_after_s=RETRY_AFTER_S,
    )

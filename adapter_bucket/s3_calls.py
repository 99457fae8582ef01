"""One call to S3: retries with full jitter, one deadline over all of them, fresh credentials.

A call is a function of a client that sends the request *and reads the whole answer*, so that a body
that breaks is retried like a request that failed. A conditional write that is sent again after a
lost answer can meet its own first attempt; the caller settles that (``publish``).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.s3_errors import EXPIRED, CutBody, can_retry, code_of, translate
from adapter_bucket.s3_settings import MIN_BYTES_PER_S, S3Settings, make_client

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

T = TypeVar("T")

_FAILURES = (ClientError, BotoCoreError, HTTPError, CutBody, OSError)

BACKOFF_S = 0.1
"""Mean-doubling backoff: the n-th wait is uniform in 0…BACKOFF_S·2ⁿ."""

MAX_BACKOFF_S = 5.0


class Deadline:
    """Time left for a call and all its retries."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative once it passed."""
        return self._end - time.monotonic()

    def check(self, subject: str) -> None:
        """Raise ``StoreUnavailable`` once it passed. Called between chunks of a body."""
        if self.left_s <= 0:
            raise StoreUnavailable(f"{subject}: no complete answer within {self.seconds:.0f} s")


class S3Calls:
    """Sends calls with one client, and replaces the client when its credentials expired."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._client = make_client(settings)

    @property
    def client(self) -> S3Client:
        """The current client."""
        return self._client

    @property
    def where(self) -> str:
        """Bucket and endpoint, for messages."""
        settings = self._settings
        return f"s3://{settings.bucket}/{settings.prefix} at {self._client.meta.endpoint_url}"

    def run(
        self, subject: str, call: Callable[[S3Client, Deadline], T], *, size_bytes: int = 0
    ) -> T:
        """Run ``call`` until it succeeds, cannot succeed, or the deadline passed.

        Args:
            subject: The key, for messages.
            call: Sends one request and reads its answer; must be safe to repeat.
            size_bytes: Payload, which extends the deadline.

        Raises:
            ObjectNotFound, PreconditionFailed, StoreDenied, StoreUnavailable, ConfigError: see
                ``s3_errors.translate``.
        """
        deadline = Deadline(self._settings.deadline_s + size_bytes / MIN_BYTES_PER_S)
        attempt, renewed = 1, False
        while True:
            client = self._client
            try:
                return call(client, deadline)
            except _FAILURES as error:
                if not renewed and _expired(error) and self._renew(client):
                    renewed = True
                    continue
                pause = random.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt))
                if (
                    not can_retry(error)
                    or attempt >= self._settings.max_attempts
                    or pause >= deadline.left_s
                ):
                    raise self._translated(error, subject) from error
            attempt += 1
            time.sleep(pause)

    def _translated(self, error: Exception, subject: str) -> Exception:
        return translate(error, subject=subject, where=self.where, bucket=self._settings.bucket)

    def _renew(self, used: S3Client) -> bool:
        """Read the credential chain again; say whether it gave other credentials."""
        with self._lock:
            if self._client is not used:
                return True  # another thread did
            fresh = make_client(self._settings)
            if _identity(fresh) == _identity(used):
                return False
            self._client = fresh
            return True


def _expired(error: Exception) -> bool:
    return isinstance(error, ClientError) and code_of(error)[0] in EXPIRED


def _identity(client: S3Client) -> tuple[str, str | None] | None:
    # botocore keeps a client's credentials on its signer only.
    credentials = client._request_signer._credentials  # type: ignore[attr-defined]
    if credentials is None:
        return None
    frozen = credentials.get_frozen_credentials()
    return frozen.access_key, frozen.token

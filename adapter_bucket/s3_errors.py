"""From what boto3 raises to our error tree, and which failures a second try can heal. Pure."""

from __future__ import annotations

from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)

from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StoreDenied,
    StoreUnavailable,
)

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
"""Codes that fresh credentials heal."""

_DENIED = EXPIRED | {
    "401", "403", "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed",
    "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
}  # fmt: skip
_MISSING = frozenset({"NoSuchKey", "NoSuchUpload", "NotFound", "404"})
_CONFLICT = frozenset({"PreconditionFailed", "412"})
_BUSY = frozenset(
    {
        # The write met another one in flight. It may or may not have lost: ask again.
        "ConditionalRequestConflict", "OperationAborted", "409",
        "InternalError", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable",
        "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "BadDigest",
        "IncompleteBody",
    }
)  # fmt: skip


class NotModifiedAnswer(Exception):
    """304 on its way from the translation to ``S3Store.get``."""


class CutBody(Exception):
    """A response ended before its announced length."""


def can_retry(error: Exception) -> bool:
    """Whether the same request may succeed at once or shortly."""
    if isinstance(error, ClientError):
        code, status = code_of(error)
        # 501 says that the store does not know the request, now or later.
        return code in _BUSY or (status >= 500 and status != 501) or status == 429
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return False
    # A TLS connection that breaks is worth another try, a certificate that is not trusted is not.
    return not _is_bad_certificate(error)


def _is_bad_certificate(error: Exception) -> bool:
    return isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)


def code_of(error: ClientError) -> tuple[str, int]:
    """S3 error code and HTTP status of a response."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code, error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def translate(error: Exception, *, subject: str, where: str, bucket: str) -> Exception:
    """Our error for what boto3 raised.

    Args:
        error: A ``ClientError``, another botocore error, ``CutBody`` or ``OSError``.
        subject: The key, or what the call was about.
        where: Bucket URL and endpoint, without credentials.
        bucket: Name of the bucket.
    """
    if isinstance(error, BucketError | NotModifiedAnswer):
        return error
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return ConfigError(
            f"no usable credentials for {where} ({error}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, a profile, or an instance role"
        )
    if _is_bad_certificate(error):
        return ConfigError(
            f"the certificate of {where} is not trusted ({error}); pass the CA's PEM file as "
            "?ca_bundle=… or AWS_CA_BUNDLE"
        )
    if not isinstance(error, ClientError):
        return StoreUnavailable(f"{subject} in {where}: {error or type(error).__name__}")
    return _translate_answer(error, subject=subject, where=where, bucket=bucket)


def _translate_answer(error: ClientError, *, subject: str, where: str, bucket: str) -> Exception:
    code, status = code_of(error)
    if status == 304:
        return NotModifiedAnswer(subject)
    if code == "NoSuchBucket":
        return StoreUnavailable(
            f"bucket {bucket!r} does not exist at {where}; it was deleted, or the URL is wrong"
        )
    if code in _MISSING:
        return ObjectNotFound(f"no object {subject} in {where}")
    if code in _CONFLICT:
        return PreconditionFailed(f"{subject} in {where} was changed by another writer")
    if code in EXPIRED:
        return StoreDenied(
            f"{subject} in {where}: the credentials have expired ({code}); renew them and start "
            "again, or use a role or profile that refreshes itself"
        )
    if code == "RequestTimeTooSkewed":
        return StoreDenied(f"{subject} in {where}: this machine's clock is wrong; set it ({code})")
    if code in _DENIED or status in (401, 403):
        return StoreDenied(
            f"{subject} in {where}: {code or status}; check the credentials and the bucket policy"
        )
    return StoreUnavailable(f"{subject} in {where}: {code or status} {error}")

"""Settings of an ``s3://`` or ``hf://`` URL, and the boto3 client they make.

What an option, the URL and the environment say is merged here and nowhere else. Options win over
the URL, the URL over the environment; credentials and, unless set, endpoint and region come from
the usual AWS chain.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)

from adapter_bucket.errors import ConfigError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

AddressingStyle = Literal["auto", "path", "virtual"]
Checksums = Literal["auto", "when_required", "when_supported"]
Capability = Literal["auto", "yes", "no"]

HF_ENDPOINT = "https://s3.hf.co"
"""The Hugging Face gateway; the owner of the bucket is the first part of its path."""


@dataclass(frozen=True)
class S3Settings:
    """Where a bucket is and how to talk to it. What is ``None`` comes from the AWS environment."""

    bucket: str
    prefix: str = ""
    """Without leading slash; empty, or ending in ``/``."""
    endpoint_url: str | None = None
    """For stores other than AWS; ``AWS_ENDPOINT_URL_S3`` and ``AWS_ENDPOINT_URL`` work too."""
    region: str | None = None
    """Part of the signature. Default off AWS: ``us-east-1``, which such stores accept."""
    addressing_style: AddressingStyle = "auto"
    """``auto`` is ``path`` off AWS: virtual hosting needs wildcard DNS there."""
    ca_bundle: str | None = None
    """PEM file to check the endpoint's certificate with; ``AWS_CA_BUNDLE`` works too."""
    profile: str | None = None
    """Profile of the shared AWS files; ``AWS_PROFILE`` works too."""
    checksums: Checksums = "auto"
    """``auto`` is ``when_required`` off AWS: many stores reject the checksums boto3 adds since
    1.36, or store their framing inside the object. The manifest carries sha256 of every file."""
    conditional_writes: Capability = "auto"
    """``no`` for a store known to ignore conditions; ``auto`` lets a writer find out."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Longest silence of the store within one response."""
    deadline_s: float = 60.0
    """Longest time for one call, all its retries included, without the time that its bytes need at
    ``MIN_BYTES_PER_S``. A call may exceed it by one ``read_timeout_s``."""
    max_attempts: int = 8
    """Of one call, the first included."""
    multipart_bytes: int = 64 * 1024**2
    """Objects from this size on travel in parts, in parallel; smaller ones in one request."""
    part_bytes: int = 16 * 1024**2
    """At least 5 MiB, S3's smallest part."""
    parallel: int = 8
    """Parts in flight."""
    access_key_id: str | None = None
    """Explicit credentials, as an option only: a URL would end up in logs."""
    secret_access_key: str | None = None
    session_token: str | None = None

    def __repr__(self) -> str:
        """Without credentials."""
        return f"S3Settings(bucket={self.bucket!r}, prefix={self.prefix!r}, …)"

    @property
    def off_aws(self) -> bool:
        """Whether the endpoint is another store's."""
        environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = self.endpoint_url or environment or ""
        return bool(endpoint) and not (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")


MIN_BYTES_PER_S = 1024 * 1024
"""Slowest transfer a deadline allows for."""

_NOT_IN_URL = {"bucket", "prefix", "access_key_id", "secret_access_key", "session_token"}
_CHOICES = {
    "addressing_style": get_args(AddressingStyle),
    "checksums": get_args(Checksums),
    "conditional_writes": get_args(Capability),
}
_LIMITS = {
    "connect_timeout_s": (0.05, 600.0),
    "read_timeout_s": (0.05, 600.0),
    "deadline_s": (0.1, 3600.0),
    "max_attempts": (1, 100),
    "multipart_bytes": (5 * 1024**2, 5 * 1024**3),
    "part_bytes": (5 * 1024**2, 5 * 1024**3),
    "parallel": (1, 64),
}


def parse_s3_url(url: str, **options: Any) -> S3Settings:
    """Read ``s3://bucket/prefix?endpoint_url=…&region=…`` or ``hf://buckets/owner/name/prefix``.

    Args:
        url: The query may set every field of ``S3Settings`` but bucket, prefix and credentials.
        options: Fields of ``S3Settings``; they win over the URL.

    Raises:
        ConfigError: no bucket name, credentials in the URL, or a setting that is unknown or
            outside its limits.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"bucket URL {parts.scheme}://…{parts.path} holds credentials; remove them: they come "
            "from the usual AWS chain"
        )
    settings = _hf_base(parts.path) if parts.scheme == "hf" else _s3_base(parts.netloc, parts.path)
    known = {field.name for field in fields(S3Settings)} - _NOT_IN_URL
    values: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(values) - known):
        raise ConfigError(
            f"bucket URL setting {unknown[0]!r} is unknown; use {', '.join(sorted(known))}"
        )
    values.update({name: value for name, value in options.items() if value is not None})
    checked = {name: _checked(name, value) for name, value in values.items()}
    try:
        return replace(settings, **checked)
    except TypeError as error:
        raise ConfigError(f"s3 option: {error}") from None


def _s3_base(bucket: str, path: str) -> S3Settings:
    if not bucket:
        raise ConfigError(f"bucket URL s3://{path} needs a bucket name: s3://bucket/prefix")
    return S3Settings(bucket=bucket, prefix=_prefix(path))


def _hf_base(path: str) -> S3Settings:
    owner, _, rest = path.strip("/").partition("/")
    bucket, _, prefix = rest.partition("/")
    if not owner or not bucket:
        raise ConfigError("a Hugging Face bucket is written hf://buckets/owner/name")
    return S3Settings(
        bucket=bucket,
        prefix=_prefix(prefix),
        endpoint_url=f"{HF_ENDPOINT}/{owner}",
        region="us-east-1",
        addressing_style="path",
        checksums="when_required",
    )


def _prefix(path: str) -> str:
    prefix = path.strip("/")
    return f"{prefix}/" if prefix else ""


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ConfigError(f"{name} is {value!r}; use {', '.join(_CHOICES[name])}")
    if name not in _LIMITS:
        return value
    low, high = _LIMITS[name]
    try:
        number = type(low)(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {value!r}; use a number") from None
    if not low <= number <= high:
        raise ConfigError(f"{name} is {value!r}; use {low} to {high}")
    return number


def make_client(settings: S3Settings) -> S3Client:
    """Make a client that tries once and never longer than its timeouts; ``s3_calls`` retries.

    Raises:
        ConfigError: no region on AWS, an unknown profile, half of a credential pair, or a
            malformed endpoint.
    """
    off_aws = settings.off_aws
    style = "path" if settings.addressing_style == "auto" and off_aws else settings.addressing_style
    checksums = settings.checksums
    if checksums == "auto":
        checksums = "when_required" if off_aws else "when_supported"
    config = Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        # One attempt: botocore's own retries know no overall deadline and stop at the response's
        # head, while a body can break as well.
        retries={"mode": "standard", "total_max_attempts": 1},
        s3={"addressing_style": style},
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        max_pool_connections=max(32, 2 * settings.parallel),
    )
    try:
        # A session of our own: boto3's default one is shared and not thread-safe to build on.
        client = boto3.session.Session(
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=settings.secret_access_key,
            aws_session_token=settings.session_token,
            profile_name=settings.profile,
        ).client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region or ("us-east-1" if off_aws else None),
            verify=settings.ca_bundle,
            config=config,
        )
    except NoRegionError:
        raise ConfigError("s3 needs a region: add ?region=… to the URL or set AWS_REGION") from None
    except PartialCredentialsError as error:
        raise ConfigError(f"s3 credentials are incomplete: {error}") from None
    except (ProfileNotFound, BotoCoreError, ValueError) as error:
        raise ConfigError(f"bucket {settings.bucket!r}: {error}") from None
    client.meta.events.register_last("before-call.s3", _send_body_at_once)
    return client


def _send_body_at_once(params: dict[str, Any], **_: object) -> None:
    """Take ``Expect: 100-continue`` out of a request: it costs a round trip (decision 86).

    botocore makes a file of every body and then adds the header to every put, a manifest's as well.
    """
    params["headers"].pop("Expect", None)

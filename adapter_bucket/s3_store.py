"""An S3-compatible bucket through boto3: ``s3://``.

Owns the translation between the ``Store`` protocol and S3 requests: conditions to headers, S3 error
codes to our error tree. Retries, signing and connection pools are botocore's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)

from adapter_bucket.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.store import NOT_MODIFIED, NotModified, Payload, StoredObject

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_COPY_BYTES = 1024 * 1024

AddressingStyle = Literal["auto", "path", "virtual"]
_ADDRESSING_STYLES: dict[str, AddressingStyle] = {s: s for s in get_args(AddressingStyle)}

_DENIED = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "403",
        "401",
    }
)
_MISSING = frozenset({"NoSuchKey", "NotFound", "404"})
_CONFLICT = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})


@dataclass(frozen=True)
class S3Settings:
    """Settings of an ``s3://`` URL. What is ``None`` comes from the usual AWS environment."""

    bucket: str
    prefix: str
    """Without leading slash; empty, or ending in ``/``."""
    endpoint_url: str | None = None
    """For stores other than AWS; ``AWS_ENDPOINT_URL_S3`` and ``AWS_ENDPOINT_URL`` work too."""
    region: str | None = None
    addressing_style: AddressingStyle = "auto"
    """``path`` for most stores off AWS."""
    ca_bundle: str | None = None
    """PEM file to check the endpoint's certificate with."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Longest silence of the store within one response."""
    max_attempts: int = 5
    """Of one request, the first included; botocore's standard mode backs off with jitter."""


def parse_s3_url(url: str) -> S3Settings:
    """Read ``s3://bucket/prefix?endpoint_url=…&region=…&addressing_style=path&ca_bundle=…``.

    Raises:
        ConfigError: no bucket name, or an unknown or malformed query setting.
    """
    parts = urlsplit(url)
    if not parts.netloc or "@" in parts.netloc:
        raise ConfigError(
            f"bucket URL {parts.scheme}://…{parts.path} needs a bucket name and no credentials: "
            "s3://bucket/prefix (credentials come from the usual AWS chain)"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"endpoint_url", "region", "addressing_style", "ca_bundle"}
    if unknown := sorted(set(query) - known):
        raise ConfigError(
            f"bucket URL setting {unknown[0]!r} is unknown; use {', '.join(sorted(known))}"
        )
    style = query.get("addressing_style", "auto")
    if style not in _ADDRESSING_STYLES:
        raise ConfigError(f"addressing_style {style!r} is not one of auto, path, virtual")
    prefix = parts.path.strip("/")
    return S3Settings(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint_url=query.get("endpoint_url"),
        region=query.get("region"),
        addressing_style=_ADDRESSING_STYLES[style],
        ca_bundle=query.get("ca_bundle"),
    )


class S3Store:
    """A ``Store`` in an S3-compatible bucket. Thread-safe: a boto3 client is."""

    def __init__(self, settings: S3Settings, client: S3Client) -> None:
        self._settings = settings
        self._bucket = settings.bucket
        self._client = client

    @classmethod
    def open(cls, url: str) -> S3Store:
        """Open the bucket and list it once, so that a wrong setting fails here.

        Raises:
            ConfigError: malformed URL, no credentials found, or no such bucket.
            StoreDenied: the credentials may not list the bucket.
            StoreUnavailable: the endpoint does not answer.
        """
        settings = parse_s3_url(url)
        try:
            store = cls(settings, _make_client(settings))
        except ValueError as error:
            raise ConfigError(f"bucket URL {url!r}: {error}") from None
        with store._translated(settings.bucket):
            store._client.list_objects_v2(Bucket=settings.bucket, Prefix=settings.prefix, MaxKeys=1)
        return store

    @property
    def url(self) -> str:
        """The bucket URL without query settings."""
        return f"s3://{self._settings.bucket}/{self._settings.prefix}".rstrip("/")

    @property
    def conditional_writes(self) -> bool:
        """S3 has had them since 2024; a store that ignores them is not detected here."""
        return True

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""
        with self._translated(key):
            return self._client.put_object(
                Bucket=self._bucket, Key=self._key(key), Body=bytes(data), IfNoneMatch="*"
            )["ETag"]

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""
        try:
            with self._translated(key):
                return self._client.put_object(
                    Bucket=self._bucket, Key=self._key(key), Body=bytes(data), IfMatch=etag
                )["ETag"]
        except ObjectNotFound:  # AWS answers 404 to If-Match on a missing key, others 412
            raise PreconditionFailed(f"{key} is gone from {self.url}") from None

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        with self._translated(key):
            return self._client.put_object(
                Bucket=self._bucket, Key=self._key(key), Body=bytes(data)
            )["ETag"]

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        try:
            with self._translated(key):
                if if_none_match is None:
                    response = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
                else:
                    response = self._client.get_object(
                        Bucket=self._bucket, Key=self._key(key), IfNoneMatch=if_none_match
                    )
                with response["Body"] as body:
                    data = body.read(None if max_bytes is None else max_bytes + 1)
        except _NotModified:
            return NOT_MODIFIED
        if max_bytes is not None and len(data) > max_bytes:
            raise IntegrityError(f"{key} is larger than {max_bytes} bytes")
        return StoredObject(data, response["ETag"])

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``."""
        with self._translated(key):
            response = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            with response["Body"] as body, path.open("xb") as file:
                got = 0
                for chunk in body.iter_chunks(_COPY_BYTES):
                    got += len(chunk)
                    if got > size:
                        break
                    file.write(chunk)
        if got != size:
            raise IntegrityError(f"{key} has {got} bytes or more, the manifest says {size}")

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        for page in self._pages(prefix, delimiter=""):
            for item in page.get("Contents", []):
                yield item["Key"].removeprefix(self._settings.prefix)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        full = self._settings.prefix + prefix
        for page in self._pages(prefix, delimiter="/"):
            for item in page.get("CommonPrefixes", []):
                yield item["Prefix"].removeprefix(full).rstrip("/")

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``. One request a key: batch deletion is not served everywhere."""
        for key in keys:
            with self._translated(key):
                self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def _key(self, key: str) -> str:
        return self._settings.prefix + key

    def _pages(self, prefix: str, *, delimiter: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._key(prefix), Delimiter=delimiter
        )
        with self._translated(prefix):
            yield from pages

    @contextmanager
    def _translated(self, subject: str) -> Iterator[None]:
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise ConfigError(
                f"no credentials for {self.url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "a profile, or an instance role"
            ) from error
        except ClientError as error:
            raise self._client_error(error, subject) from error
        except (BotoCoreError, HTTPClientError) as error:
            endpoint = self._client.meta.endpoint_url
            raise StoreUnavailable(f"{subject} in {self.url} at {endpoint}: {error}") from error

    def _client_error(self, error: ClientError, subject: str) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status == 304:
            return _NotModified(subject)
        if code == "NoSuchBucket":
            return ConfigError(
                f"bucket {self._bucket!r} does not exist at {self._client.meta.endpoint_url}; "
                "create it or correct the URL"
            )
        if code in _MISSING:
            return ObjectNotFound(subject)
        if code in _CONFLICT:
            return PreconditionFailed(f"{subject} in {self.url} was changed by another writer")
        if code in _DENIED:
            return StoreDenied(
                f"{subject} in {self.url}: {code}; check the credentials and the bucket policy"
            )
        return StoreUnavailable(f"{subject} in {self.url}: {code or status} {error}")


class _NotModified(Exception):
    """304 on its way from the error translation to ``S3Store.get``."""


def _make_client(settings: S3Settings) -> S3Client:
    style = settings.addressing_style
    off_aws = (
        settings.endpoint_url
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if style == "auto" and off_aws:
        style = "path"  # virtual hosting needs wildcard DNS, which few stores off AWS have
    config = Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
        s3={"addressing_style": style},
        # Many S3-compatible stores reject the checksums boto3 sends by default since 1.36, or
        # store their framing inside the object. The manifest carries sha256 of every file.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=32,
    )
    # A region is part of the signature only; stores off AWS accept any.
    region = settings.region or ("us-east-1" if off_aws else None)
    try:
        # A session of our own: boto3's default session is shared and not thread-safe to build on.
        return boto3.session.Session().client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=region,
            verify=settings.ca_bundle,
            config=config,
        )
    except NoRegionError:
        raise ConfigError("s3 needs a region: add ?region=… to the URL or set AWS_REGION") from None

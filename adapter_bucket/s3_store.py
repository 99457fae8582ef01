"""An S3-compatible bucket through boto3: ``s3://`` and ``hf://``.

Owns the translation between the ``Store`` protocol and S3 requests. Retries, deadline and renewal
of credentials are in ``s3_calls``, the bytes of large objects in ``s3_transfer``, settings in
``s3_settings``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from adapter_bucket.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from adapter_bucket.file_slices import FileSlices, Sliceable
from adapter_bucket.s3_calls import Deadline, S3Calls
from adapter_bucket.s3_errors import CutBody, NotModifiedAnswer
from adapter_bucket.s3_settings import S3Settings, parse_s3_url
from adapter_bucket.s3_transfer import (
    abort_upload,
    body_of,
    download,
    etag_of,
    head_of,
    md5_of,
    read_body,
    upload_parts,
)
from adapter_bucket.store import NOT_MODIFIED, NotModified, ObjectInfo, Payload, StoredObject

if TYPE_CHECKING:
    from pathlib import Path

    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef


class S3Store:
    """A ``Store`` in an S3-compatible bucket. Thread-safe: a boto3 client is."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._bucket = settings.bucket
        self._calls = S3Calls(settings)
        self._conditional_writes = settings.conditional_writes != "no"

    @classmethod
    def open(cls, url: str, **options: Any) -> S3Store:
        """Open the bucket and list it once, so that a wrong setting fails here.

        Args:
            url: See ``s3_settings.parse_s3_url``.
            options: Fields of ``S3Settings``, which win over the URL.

        Raises:
            ConfigError: malformed URL, no credentials found, or no such bucket.
            StoreDenied: the credentials may not list the bucket.
            StoreUnavailable: the endpoint does not answer.
        """
        store = cls(parse_s3_url(url, **options))
        try:
            store._list_once()
        except StoreUnavailable as error:
            if "does not exist" in str(error):
                # Before the run starts this is a setting to correct; later it is an outage.
                raise ConfigError(f"{error}. Create the bucket or correct the URL") from error
            raise
        return store

    @property
    def url(self) -> str:
        """The bucket URL without query settings."""
        return f"s3://{self._bucket}/{self.settings.prefix}".rstrip("/")

    @property
    def endpoint(self) -> str:
        """The endpoint's URL."""
        return self._calls.client.meta.endpoint_url

    @property
    def conditional_writes(self) -> bool:
        """True unless the settings or a probe (``capabilities``) say otherwise."""
        return self._conditional_writes

    def assume_conditional_writes(self, honoured: bool) -> None:
        """Record what a probe found; an explicit setting is kept."""
        if self.settings.conditional_writes == "auto":
            self._conditional_writes = honoured

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""
        return self._create(key, data if isinstance(data, bytes) else memoryview(data).cast("B"))

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""
        try:
            if self._conditional_writes:
                return self._put(key, data, IfMatch=etag)
            if self._head_etag(key) == etag:
                return self._put(key, data)
        except ObjectNotFound:  # AWS answers 404 to If-Match on a missing key, others 412
            raise PreconditionFailed(f"{key} is gone from {self.url}") from None
        raise PreconditionFailed(f"{key} in {self.url} was changed by another writer")

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        return self._put(key, data)

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        try:
            found = self._get(key, if_none_match, max_bytes)
        except NotModifiedAnswer:
            return NOT_MODIFIED
        # A gateway that ignores the condition still says by the ETag that nothing changed.
        return NOT_MODIFIED if found.etag == if_none_match else found

    def answers_304(self, key: str, etag: str) -> bool:
        """Whether a conditional get of an unchanged object saves the body."""
        try:
            self._get(key, etag, None)
        except NotModifiedAnswer:
            return True
        return False

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``. Errors of writing ``path`` are ``OSError``."""
        download(self._calls, self.settings, key, path, size=size)

    def upload(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.upload``. Errors of reading ``path`` are ``OSError``."""
        with FileSlices(path, size) as file:
            self._create(key, file)

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        for info in self.scan(prefix):
            yield info.key

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Store.scan``."""
        for page in self._pages(prefix, delimiter=""):
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(self.settings.prefix)
                yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        full = self.settings.prefix + prefix
        for page in self._pages(prefix, delimiter="/"):
            for item in page.get("CommonPrefixes", []):
                yield item["Prefix"].removeprefix(full).rstrip("/")

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``. One request a key: batch deletion is not served everywhere."""
        for key in keys:

            def call(client: S3Client, _: Deadline, full: str = self._key(key)) -> None:
                client.delete_object(Bucket=self._bucket, Key=full)

            self._calls.run(key, call)

    def now(self) -> float:
        """See ``Store.now``: the ``Date`` header, whole seconds."""
        headers = self._list_once()["ResponseMetadata"]["HTTPHeaders"]
        try:
            return parsedate_to_datetime(headers["date"]).timestamp()
        except (KeyError, ValueError):
            raise StoreUnavailable(f"{self.endpoint} sends no usable Date header") from None

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See ``Store.sweep``: aborts uploads in parts that nobody will complete."""
        before = self.now() - older_than_s
        found = self._calls.run(
            prefix,
            lambda client, _: client.list_multipart_uploads(
                Bucket=self._bucket, Prefix=self._key(prefix)
            ),
        )
        stale = [
            upload
            for upload in found.get("Uploads", [])
            if upload["Initiated"].timestamp() < before
        ]
        for upload in stale:
            abort_upload(self._calls, self._bucket, upload["Key"], upload["UploadId"])
        return len(stale)

    def _create(self, key: str, data: Sliceable) -> str:
        exclusive = self._conditional_writes
        if not exclusive and self._exists(key):
            raise PreconditionFailed(f"{key} exists already in {self.url}")
        if len(data) >= self.settings.multipart_bytes:
            return upload_parts(self._calls, self.settings, key, data, create_only=exclusive)
        return self._put(key, data[:], **({"IfNoneMatch": "*"} if exclusive else {}))

    def _get(self, key: str, if_none_match: str | None, max_bytes: int | None) -> StoredObject:
        condition: dict[str, Any] = {"IfNoneMatch": if_none_match} if if_none_match else {}

        def call(client: S3Client, deadline: Deadline) -> StoredObject:
            response = client.get_object(Bucket=self._bucket, Key=self._key(key), **condition)
            etag, length = head_of(response, key)
            if max_bytes is not None and length > max_bytes:
                response["Body"].close()
                raise IntegrityError(f"{key} has {length} bytes, more than {max_bytes}")
            sink = io.BytesIO()
            read_body(
                response["Body"], sink, length=length, limit=length, deadline=deadline, subject=key
            )
            return StoredObject(sink.getvalue(), etag)

        return self._calls.run(key, call, size_bytes=max_bytes or 0)

    def _put(self, key: str, data: Payload, **condition: Any) -> str:
        digest = md5_of(data)

        def call(client: S3Client, _: Deadline) -> str:
            response = client.put_object(
                Bucket=self._bucket,
                Key=self._key(key),
                Body=body_of(data),
                ContentMD5=digest,
                **condition,
            )
            return etag_of(response, key)

        return self._calls.run(key, call, size_bytes=memoryview(data).nbytes)

    def _exists(self, key: str) -> bool:
        try:
            self._head_etag(key)
        except ObjectNotFound:
            return False
        return True

    def _head_etag(self, key: str) -> str:
        return self._calls.run(
            key,
            lambda client, _: etag_of(
                client.head_object(Bucket=self._bucket, Key=self._key(key)), key
            ),
        )

    def _list_once(self) -> ListObjectsV2OutputTypeDef:
        return self._calls.run(
            "listing",
            lambda client, _: client.list_objects_v2(
                Bucket=self._bucket, Prefix=self.settings.prefix, MaxKeys=1
            ),
        )

    def _pages(self, prefix: str, *, delimiter: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        arguments: dict[str, Any] = {"Prefix": self._key(prefix), "Delimiter": delimiter}

        def call(client: S3Client, _: Deadline) -> ListObjectsV2OutputTypeDef:
            page = client.list_objects_v2(Bucket=self._bucket, **arguments)
            if "Name" not in page and "IsTruncated" not in page:  # else a web page lists as empty
                raise CutBody(f"{prefix}: the answer is no listing")
            return page

        while True:
            page = self._calls.run(prefix, call)
            yield page
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            if not following or following == arguments.get("ContinuationToken"):
                raise StoreUnavailable(
                    f"the listing of {prefix} in {self.url} does not go on behind its first pages: "
                    "the store cannot list that many objects"
                )
            arguments["ContinuationToken"] = following

    def _key(self, key: str) -> str:
        return self.settings.prefix + key

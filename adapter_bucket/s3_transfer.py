"""Bytes to and from S3: bodies without copies, downloads in ranges, uploads in parts."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from adapter_bucket.errors import BucketError, IntegrityError, ObjectNotFound
from adapter_bucket.file_slices import Sliceable
from adapter_bucket.parallel import in_parallel
from adapter_bucket.s3_calls import Deadline, S3Calls
from adapter_bucket.s3_errors import CutBody
from adapter_bucket.s3_settings import S3Settings
from adapter_bucket.store import Payload

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

# Small enough that a deadline is looked at often on a slow line, large enough for few waits for the
# interpreter lock (see ``pieces``).
_CHUNK_BYTES = 1024 * 1024


class ViewBody(io.RawIOBase):
    """A readable, seekable file over a buffer, so that a request sends it without a copy."""

    def __init__(self, data: Payload) -> None:
        self._view = memoryview(data).cast("B")
        self._at = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always: a retry rewinds."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Copy the next bytes into ``buffer``."""
        count = min(len(buffer), len(self._view) - self._at)
        buffer[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move like a file."""
        base = (0, self._at, len(self._view))[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Position in bytes."""
        return self._at

    def __len__(self) -> int:
        return len(self._view)


def body_of(data: Payload) -> bytes | IO[Any]:
    """What boto3 takes as ``Body`` for ``data``, without copying it."""
    if isinstance(data, bytes):
        return data
    return cast("IO[Any]", ViewBody(data))  # reads, seeks and tells like one


def md5_of(data: Payload) -> str:
    """Value of ``Content-MD5``, which makes a store refuse a body that ended early.

    SeaweedFS 4.48 stores an empty object when a client is killed between the headers and the body
    of a put without a digest (``test_a_put_that_dies_within_its_body_stores_nothing``).
    """
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def head_of(response: Mapping[str, Any], subject: str) -> tuple[str, int]:
    """ETag and length from a response's headers.

    Raises:
        CutBody: a header is missing: the connection broke within the headers, which Python's HTTP
            client passes off as a complete answer.
    """
    etag, length = response.get("ETag"), response.get("ContentLength")
    if not isinstance(etag, str) or not isinstance(length, int):
        raise CutBody(f"{subject}: the answer's headers are not complete")
    return etag, length


def etag_of(response: Mapping[str, Any], subject: str, *, field: str = "ETag") -> str:
    """ETag, or another field, of a write's answer; see ``head_of``."""
    value = response.get(field)
    if not isinstance(value, str):
        raise CutBody(f"{subject}: the answer's headers are not complete")
    return value


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


def read_body(
    body: StreamingBody,
    sink: _Sink,
    *,
    length: int,
    limit: int,
    deadline: Deadline,
    subject: str,
) -> int:
    """Copy a response's body to ``sink``, never more than ``limit`` bytes.

    Args:
        body: The response's body; closed afterwards.
        sink: Gets the chunks.
        length: Announced length, bytes.
        limit: Most bytes to read.
        deadline: Looked at before each chunk.
        subject: The key, for messages.

    Returns:
        How many bytes were copied: ``min(length, limit)``.

    Raises:
        CutBody: it ended earlier.
    """
    wanted, got = min(length, limit), 0
    with body:
        while got < wanted:
            deadline.check(subject)
            chunk = body.read(min(_CHUNK_BYTES, wanted - got))
            if not chunk:
                raise CutBody(f"{subject}: {got} of {length} bytes arrived")
            sink.write(chunk)
            got += len(chunk)
    return got


def download(calls: S3Calls, settings: S3Settings, key: str, path: Path, *, size: int) -> None:
    """Bring an object of known size to a new file, large ones in parallel ranges.

    Raises:
        IntegrityError: the object has another size; at most ``size`` bytes were written.
        ObjectNotFound: no such object.
        OSError: the local file cannot be written.
    """
    full = settings.prefix + key
    step = size if size < settings.multipart_bytes else settings.part_bytes

    def part(handle: int, start: int) -> None:
        length = min(step, size - start)
        whole = length == size

        def call(client: S3Client, deadline: Deadline) -> None:
            if whole:
                response = client.get_object(Bucket=settings.bucket, Key=full)
                _, total = head_of(response, key)
            else:
                response = client.get_object(
                    Bucket=settings.bucket, Key=full, Range=f"bytes={start}-{start + length - 1}"
                )
                total = int(response.get("ContentRange", f"/{size}").rpartition("/")[2])
            if total != size or head_of(response, key)[1] != length:
                response["Body"].close()
                raise IntegrityError(f"{key} has {total} bytes, the manifest says {size}")
            sink = _LocalFile(handle, start)
            read_body(
                response["Body"], sink, length=length, limit=length, deadline=deadline, subject=key
            )

        calls.run(key, call, size_bytes=length)

    with path.open("xb") as file:
        starts = range(0, max(size, 1), max(step, 1))
        try:
            in_parallel(lambda start: part(file.fileno(), start), starts, settings.parallel)
        except _LocalWriteError as error:
            raise error.cause from None


class _LocalWriteError(Exception):
    """The local disk failed; never mistaken for a network error, which is retried."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _LocalFile:
    """Writes at its own position of a file that several parts share."""

    def __init__(self, handle: int, at: int) -> None:
        self._handle = handle
        self._at = at

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._handle, view, self._at)
                self._at += count
                view = view[count:]
        except OSError as error:
            raise _LocalWriteError(error) from error


def upload_parts(
    calls: S3Calls, settings: S3Settings, key: str, data: Sliceable, *, create_only: bool
) -> str:
    """Write an object in parts, in parallel; return its ETag.

    Guarantees: readers see nothing or all of it. ``create_only`` holds against objects that existed
    when the parts were joined; some stores let several uploads that are joined at the same moment
    all win, so what must have one writer is claimed before (``publish`` writes the config first).

    Raises:
        PreconditionFailed: ``create_only`` and the key exists.
    """
    full, bucket = settings.prefix + key, settings.bucket
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if create_only else {}
    upload = calls.run(
        key,
        lambda client, _: etag_of(
            client.create_multipart_upload(Bucket=bucket, Key=full), key, field="UploadId"
        ),
    )

    def part(start: int) -> CompletedPartTypeDef:
        piece, number = data[start : start + settings.part_bytes], start // settings.part_bytes + 1
        digest = md5_of(piece)
        etag = calls.run(
            key,
            lambda client, _: etag_of(
                client.upload_part(
                    Bucket=bucket,
                    Key=full,
                    UploadId=upload,
                    PartNumber=number,
                    Body=body_of(piece),
                    ContentMD5=digest,
                ),
                key,
            ),
            size_bytes=len(piece),
        )
        return {"PartNumber": number, "ETag": etag}

    try:
        parts = in_parallel(part, range(0, len(data), settings.part_bytes), settings.parallel)
        return calls.run(
            key,
            lambda client, _: etag_of(
                client.complete_multipart_upload(
                    Bucket=bucket,
                    Key=full,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    **condition,
                ),
                key,
            ),
        )
    except ObjectNotFound:
        # NoSuchUpload after a lost answer: the parts were joined, and the upload is gone.
        return calls.run(
            key, lambda client, _: etag_of(client.head_object(Bucket=bucket, Key=full), key)
        )
    except BaseException:
        with suppress(BucketError):  # what stays is removed by ``sweep``
            abort_upload(calls, bucket, full, upload)
        raise


def abort_upload(calls: S3Calls, bucket: str, full_key: str, upload: str) -> None:
    """Drop an upload in parts; one that is gone already is no error."""
    with suppress(ObjectNotFound):
        calls.run(
            full_key,
            lambda client, _: client.abort_multipart_upload(
                Bucket=bucket, Key=full_key, UploadId=upload
            ),
        )

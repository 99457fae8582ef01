"""The store protocol: the few operations the contract needs of an object store.

Four verbs carry the contract: create-only put, compare-and-swap put, conditional get, delete.
Keys are UTF-8 strings with ``/``; every key comes from ``layout``. ETags are opaque strings,
compared for equality only.

Implementations are safe to call from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

Payload: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class StoredObject:
    """An object as it was read: the bytes and the ETag belong together."""

    data: bytes
    etag: str


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says of one object."""

    key: str
    size: int
    """Bytes."""
    modified_at: float
    """Unix time by the store's clock, seconds. Compare with ``Store.now`` only."""


class NotModified:
    """Answer of a conditional get whose ETag still matches."""


NOT_MODIFIED = NotModified()


@runtime_checkable
class Store(Protocol):
    """An object store, rooted at a bucket URL.

    Every method may raise ``StoreUnavailable`` (after the store's own retries and deadline) or
    ``StoreDenied`` (credentials, permissions).
    """

    @property
    def url(self) -> str:
        """The bucket URL without credentials, for logs and errors."""
        ...

    def create(self, key: str, data: Payload) -> str:
        """Write a new object and return its ETag.

        Guarantees: atomic; readers see nothing or all of it. Never overwrites.

        Raises:
            PreconditionFailed: the key exists already.
        """
        ...

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """Replace the object if its ETag is still ``etag``; return the new ETag.

        Guarantees: atomic compare-and-swap among all writers, if the store has conditional writes
        (``conditional_writes``); read, check, write otherwise.

        Raises:
            PreconditionFailed: the object changed, or is gone.
        """
        ...

    def overwrite(self, key: str, data: Payload) -> str:
        """Write an object whatever is there. For heartbeats: one owner per key, no history."""
        ...

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """Read a whole small object.

        Args:
            key: The object's key.
            if_none_match: ETag the caller holds; if it is current, ``NOT_MODIFIED`` is returned.
                A store that ignores the condition returns the object: that is a normal answer.
            max_bytes: Refuse a larger object instead of reading it into memory.

        Raises:
            ObjectNotFound: no such object.
            IntegrityError: the object is larger than ``max_bytes``.
        """
        ...

    def download(self, key: str, path: Path, *, size: int) -> None:
        """Read an object of known size into a new file at ``path``.

        Bytes beyond ``size`` are not read to disk: a larger object fails.

        Raises:
            ObjectNotFound: no such object.
            IntegrityError: the object does not have ``size`` bytes.
        """
        ...

    def upload(self, key: str, path: Path, *, size: int) -> None:
        """Write a new object from the local file at ``path``; the counterpart of ``download``.

        Guarantees: as ``create``. Memory does not grow with the size of the file.

        Raises:
            PreconditionFailed: the key exists already.
            IntegrityError: the file does not have ``size`` bytes (any more).
        """
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that start with ``prefix``, in no promised order. For discovery and garbage only."""
        ...

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """Like ``list``, with sizes and times. For garbage collection and people."""
        ...

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """Names of the "directories" right below ``prefix`` (which ends in ``/``)."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist are no error."""
        ...

    def now(self) -> float:
        """Unix time by the store's clock, seconds. Costs a request; never used for ordering."""
        ...

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """Remove what interrupted writes left below ``prefix`` and no reader can see.

        Returns:
            How many leftovers were removed (temporary files, parts of multipart uploads).
        """
        ...

    @property
    def conditional_writes(self) -> bool:
        """Whether ``create`` and ``replace`` are atomic among all writers of this store."""
        ...

"""A bucket in memory, for tests and docs: the reference behaviour of ``Store``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from adapter_bucket.errors import IntegrityError, ObjectNotFound, PreconditionFailed
from adapter_bucket.store import NOT_MODIFIED, NotModified, Payload, StoredObject


class MemoryStore:
    """A ``Store`` whose objects live in a dict. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, StoredObject] = {}
        self._etags = itertools.count(1)
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        """The URL shown in messages; it cannot be opened."""
        return "memory://"

    @property
    def conditional_writes(self) -> bool:
        """Always."""
        return True

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""
        with self._lock:
            if key in self._objects:
                raise PreconditionFailed(f"{key} exists already in {self.url}")
            return self.overwrite(key, data)

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""
        with self._lock:
            current = self._objects.get(key)
            if current is None or current.etag != etag:
                raise PreconditionFailed(f"{key} in {self.url} was changed by another writer")
            return self.overwrite(key, data)

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        with self._lock:
            stored = StoredObject(bytes(data), f"etag-{next(self._etags)}")
            self._objects[key] = stored
            return stored.etag

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise ObjectNotFound(key)
        if max_bytes is not None and len(stored.data) > max_bytes:
            raise IntegrityError(f"{key} is larger than {max_bytes} bytes")
        return NOT_MODIFIED if stored.etag == if_none_match else stored

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``."""
        stored = self.get(key)
        assert isinstance(stored, StoredObject)
        if len(stored.data) != size:
            raise IntegrityError(f"{key} has {len(stored.data)} bytes, the manifest says {size}")
        with path.open("xb") as file:
            file.write(stored.data)

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        with self._lock:
            keys = [key for key in self._objects if key.startswith(prefix)]
        yield from keys

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        rest = (key.removeprefix(prefix) for key in self.list(prefix))
        yield from {part.partition("/")[0] for part in rest if "/" in part}

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

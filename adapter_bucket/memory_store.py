"""A bucket in memory, for tests and docs: the reference behaviour of ``Store``.

``memory://name`` opens the same bucket wherever it is opened in one process. A hook sees every call
before and after it takes effect, so a test can fail, delay or interleave calls: raising before is a
request that never arrived, raising after is an answer that was lost.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from adapter_bucket.errors import IntegrityError, ObjectNotFound, PreconditionFailed
from adapter_bucket.file_slices import FileSlices
from adapter_bucket.store import NOT_MODIFIED, NotModified, ObjectInfo, Payload, StoredObject

Hook: TypeAlias = Callable[[Literal["before", "after"], str, str], None]
"""Called with the phase, the name of the ``Store`` method, and the key or prefix."""

_NAMED: dict[str, MemoryStore] = {}
_NAMED_LOCK = threading.Lock()


class MemoryStore:
    """A ``Store`` whose objects live in a dict. Thread-safe.

    Args:
        hook: See the module; ``None`` injects nothing.
        conditional_writes: ``False`` imitates a store that ignores conditions on writes: check and
            write are two calls then, the second one named ``…-unchecked`` to the hook.
        clock: Unix time, seconds: the store's clock.
    """

    def __init__(
        self,
        *,
        hook: Hook | None = None,
        conditional_writes: bool = True,
        clock: Callable[[], float] = time.time,
        name: str = "",
    ) -> None:
        self.hook = hook
        self._conditional_writes = conditional_writes
        self._clock = clock
        self._name = name
        self._objects: dict[str, tuple[StoredObject, float]] = {}
        self._etags = itertools.count(1)
        self._lock = threading.RLock()

    @classmethod
    def open(cls, url: str) -> MemoryStore:
        """Open ``memory://name``: one bucket per name and process."""
        name = url.removeprefix("memory://")
        with _NAMED_LOCK:
            return _NAMED.setdefault(name, cls(name=name))

    def view(self, hook: Hook | None) -> MemoryStore:
        """The same bucket as another client sees it, with a hook of its own."""
        other = copy.copy(self)
        other.hook = hook
        return other

    @property
    def url(self) -> str:
        """The URL shown in messages."""
        return f"memory://{self._name}"

    @property
    def conditional_writes(self) -> bool:
        """As given at construction."""
        return self._conditional_writes

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""

        def check() -> None:
            if key in self._objects:
                raise PreconditionFailed(f"{key} exists already in {self.url}")

        return self._put_if(check, "create", key, data)

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""

        def check() -> None:
            current = self._objects.get(key)
            if current is None or current[0].etag != etag:
                raise PreconditionFailed(f"{key} in {self.url} was changed by another writer")

        return self._put_if(check, "replace", key, data)

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        with self._call("overwrite", key):
            return self._put(key, data)

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        with self._call("get", key):
            stored = self._read(key)
        if stored.etag == if_none_match:
            return NOT_MODIFIED
        if max_bytes is not None and len(stored.data) > max_bytes:
            raise IntegrityError(f"{key} is larger than {max_bytes} bytes")
        return stored

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``."""
        with self._call("download", key):
            stored = self._read(key)
        if len(stored.data) != size:
            raise IntegrityError(f"{key} has {len(stored.data)} bytes, the manifest says {size}")
        with path.open("xb") as file:
            file.write(stored.data)

    def upload(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.upload``."""
        with FileSlices(path, size) as file:
            self.create(key, file[0:size])

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        yield from [info.key for info in self._infos("list", prefix)]

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Store.scan``."""
        yield from self._infos("scan", prefix)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        rest = (info.key.removeprefix(prefix) for info in self._infos("list_dirs", prefix))
        yield from sorted({part.partition("/")[0] for part in rest if "/" in part})

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``."""
        for key in keys:
            with self._call("delete", key):
                self._objects.pop(key, None)

    def now(self) -> float:
        """See ``Store.now``."""
        return self._clock()

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See ``Store.sweep``. Writes to memory leave nothing behind."""
        return 0

    def _put_if(self, check: Callable[[], None], name: str, key: str, data: Payload) -> str:
        if self._conditional_writes:
            with self._call(name, key):
                check()
                return self._put(key, data)
        with self._call(name, key):
            check()
        with self._call(f"{name}-unchecked", key):
            return self._put(key, data)

    @contextmanager
    def _call(self, name: str, key: str) -> Iterator[None]:
        if self.hook is not None:
            self.hook("before", name, key)
        with self._lock:
            yield
        if self.hook is not None:
            self.hook("after", name, key)

    def _put(self, key: str, data: Payload) -> str:
        stored = StoredObject(bytes(data), f"etag-{next(self._etags)}")
        self._objects[key] = (stored, self._clock())
        return stored.etag

    def _read(self, key: str) -> StoredObject:
        if key not in self._objects:
            raise ObjectNotFound(f"no object {key} in {self.url}")
        return self._objects[key][0]

    def _infos(self, name: str, prefix: str) -> Sequence[ObjectInfo]:
        with self._call(name, prefix):
            return [
                ObjectInfo(key, len(stored.data), modified_at)
                for key, (stored, modified_at) in self._objects.items()
                if key.startswith(prefix)
            ]

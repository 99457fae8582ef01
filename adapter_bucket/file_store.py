"""A folder as a bucket: ``file://``. For one machine, a network share or a FUSE mount.

Owns atomicity on a file system: a write goes to a temporary file beside its target, is flushed to
disk and renamed. Conditional writes take a lock file made with ``O_EXCL`` (works without flock and
without hard links).
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapter_bucket.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.store import NOT_MODIFIED, NotModified, Payload, StoredObject

_TEMP_PREFIX = ".tmp-"
_LOCK_SUFFIX = ".lock"

LOCK_STALE_S = 30.0
"""A lock older than this belongs to a dead process: its holder needs milliseconds."""

LOCK_WAIT_S = 60.0
"""Longest wait for another writer's lock, above ``LOCK_STALE_S`` so that a dead one is outlived."""

_COPY_BYTES = 1024 * 1024


class FileStore:
    """A ``Store`` in a directory. Thread-safe; several processes may share the directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def open(cls, url: str) -> FileStore:
        """Open ``file:///absolute/dir``; create the directory if only its last part is missing.

        Raises:
            ConfigError: the path is relative, its parent does not exist, or it is a file.
            StoreDenied: the directory may not be written.
        """
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute():
            raise ConfigError(f"bucket URL {url!r} needs an absolute path: file:///dir")
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise ConfigError(
                f"bucket {url!r} does not exist and neither does its parent {str(path.parent)!r}; "
                "create it or correct the URL"
            ) from None
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"bucket {url!r} is not a directory") from None
        except OSError as error:
            raise _store_error(error, url) from error
        if not os.access(path, os.R_OK | os.X_OK):
            raise StoreDenied(f"bucket {url!r} may not be read by this user")
        return cls(path)

    @property
    def url(self) -> str:
        """The bucket URL."""
        return self._root.as_uri()

    @property
    def conditional_writes(self) -> bool:
        """Always: the lock file excludes every other process that uses this class."""
        return True

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""
        path = self._path(key)
        with self._locked(path):
            if path.exists():
                raise PreconditionFailed(f"{key} exists already in {self.url}")
            return self._write(path, data)

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""
        path = self._path(key)
        with self._locked(path):
            try:
                current = _etag(path.read_bytes())
            except FileNotFoundError:
                raise PreconditionFailed(f"{key} is gone from {self.url}") from None
            if current != etag:
                raise PreconditionFailed(f"{key} in {self.url} was changed by another writer")
            return self._write(path, data)

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        return self._write(self._path(key), data)

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        limit = -1 if max_bytes is None else max_bytes + 1
        try:
            with self._path(key).open("rb") as file:
                data = file.read(limit)
        except OSError as error:
            raise _store_error(error, key) from error
        if max_bytes is not None and len(data) > max_bytes:
            raise IntegrityError(f"{key} is larger than {max_bytes} bytes")
        etag = _etag(data)
        return NOT_MODIFIED if etag == if_none_match else StoredObject(data, etag)

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``."""
        try:
            with self._path(key).open("rb") as source:
                actual = os.fstat(source.fileno()).st_size
                if actual != size:
                    raise IntegrityError(f"{key} has {actual} bytes, the manifest says {size}")
                with path.open("xb") as target:
                    while chunk := source.read(_COPY_BYTES):
                        target.write(chunk)
        except OSError as error:
            raise _store_error(error, key) from error

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        start = self._root / prefix.rpartition("/")[0]
        for folder, _, files in os.walk(start):
            for name in files:
                if name.startswith(_TEMP_PREFIX) or name.endswith(_LOCK_SUFFIX):
                    continue
                key = (Path(folder) / name).relative_to(self._root).as_posix()
                if key.startswith(prefix):
                    yield key

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        try:
            with os.scandir(self._root / prefix) as entries:
                yield from (entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise _store_error(error, prefix) from error

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``. Directories left empty are removed too."""
        for key in keys:
            path = self._path(key)
            with suppress(FileNotFoundError):
                path.unlink()
            for parent in path.parents:
                if parent == self._root:
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty, or already gone: both end the climb
                    break

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ConfigError(f"key {key!r} is not a relative key of plain names")
        return self._root.joinpath(*parts)

    def _write(self, path: Path, data: Payload) -> str:
        temp = path.with_name(f"{_TEMP_PREFIX}{uuid.uuid4().hex}")
        try:
            self._write_temp(temp, data)
            # The rename is the commit: a reader opens the old file or the new one, never a part.
            temp.replace(path)
        except OSError as error:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
            raise _store_error(error, path.relative_to(self._root).as_posix()) from error
        return _etag(data)

    @staticmethod
    def _write_temp(temp: Path, data: Payload) -> None:
        for attempt in range(3):
            temp.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temp.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                return
            except FileNotFoundError:  # a concurrent delete removed the then empty directory
                if attempt == 2:
                    raise

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        lock = path.with_name(path.name + _LOCK_SUFFIX)
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._try_lock(lock):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{lock} is held by another writer for {LOCK_WAIT_S:.0f} s; remove it if no "
                    "writer is alive"
                )
            time.sleep(0.005)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

    @staticmethod
    def _try_lock(lock: Path) -> bool:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > LOCK_STALE_S:
                    lock.unlink()
            return False
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _store_error(error, str(lock)) from error


def _etag(data: Payload) -> str:
    return hashlib.sha256(data).hexdigest()


def _store_error(error: OSError, subject: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(subject)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(f"{subject}: {error.strerror}; check the directory's permissions")
    return StoreUnavailable(f"{subject}: {error.strerror or error}")

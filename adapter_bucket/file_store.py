"""A folder as a bucket: ``file://``. For one machine, a network share or a FUSE mount.

Owns atomicity on a file system, from two promises only: renaming a file over another one is atomic,
and renaming a directory onto a non-empty one fails. No flock and no hard links, which network and
FUSE file systems often lack. How a write excludes another one is in ``file_lock``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.file_lock import LOCK_SUFFIX, STAGE_PREFIX, FileLock
from adapter_bucket.file_slices import FileSlices
from adapter_bucket.pieces import PIECE_BYTES
from adapter_bucket.store import NOT_MODIFIED, NotModified, ObjectInfo, Payload, StoredObject


class FileStore:
    """A ``Store`` in a directory. Thread-safe; several processes may share the directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def open(cls, url: str) -> FileStore:
        """Open ``file:///absolute/dir``; create the directory if only its last part is missing.

        Raises:
            ConfigError: the path is relative, its parent does not exist, or it is a file.
            StoreDenied: the directory may not be read.
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
        """Always: every process that uses this class takes the same lock."""
        return True

    def create(self, key: str, data: Payload) -> str:
        """See ``Store.create``."""
        return self._create(key, data)

    def replace(self, key: str, data: Payload, *, etag: str) -> str:
        """See ``Store.replace``."""

        def check(path: Path) -> None:
            try:
                current = _etag(path.read_bytes())
            except FileNotFoundError:
                raise PreconditionFailed(f"{key} is gone from {self.url}") from None
            if current != etag:
                raise PreconditionFailed(f"{key} in {self.url} was changed by another writer")

        return self._exclusively(key, data, check)

    def overwrite(self, key: str, data: Payload) -> str:
        """See ``Store.overwrite``."""
        path = self._path(key)
        self._check_there()
        try:
            with _staged(path, data) as stage:
                stage.commit()
                return stage.sha256
        except OSError as error:
            raise self._error(error, key) from error

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        """See ``Store.get``."""
        limit = -1 if max_bytes is None else max_bytes + 1
        try:
            with self._path(key).open("rb") as file:
                data = file.read(limit)
        except OSError as error:
            raise self._error(error, key) from error
        if max_bytes is not None and len(data) > max_bytes:
            raise IntegrityError(f"{key} is larger than {max_bytes} bytes")
        etag = _etag(data)
        return NOT_MODIFIED if etag == if_none_match else StoredObject(data, etag)

    def download(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.download``. Errors of writing ``path`` are ``OSError``."""
        try:
            source = self._path(key).open("rb")
        except OSError as error:
            raise self._error(error, key) from error
        with source:
            actual = os.fstat(source.fileno()).st_size
            if actual != size:
                raise IntegrityError(f"{key} has {actual} bytes, the manifest says {size}")
            with path.open("xb") as target:
                shutil.copyfileobj(source, target, PIECE_BYTES)

    def upload(self, key: str, path: Path, *, size: int) -> None:
        """See ``Store.upload``. Errors of reading ``path`` are ``OSError``."""
        with FileSlices(path, size) as file:
            self._create(key, file)

    def list(self, prefix: str) -> Iterator[str]:
        """See ``Store.list``."""
        for path in self._walk(prefix):
            yield path.relative_to(self._root).as_posix()

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Store.scan``."""
        for path in self._walk(prefix):
            key = path.relative_to(self._root).as_posix()
            try:
                status = path.stat()
            except FileNotFoundError:  # deleted since
                continue
            except OSError as error:
                raise self._error(error, key) from error
            yield ObjectInfo(key, status.st_size, status.st_mtime)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See ``Store.list_dirs``."""
        try:
            with os.scandir(self._root / prefix) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            self._check_there()
            return
        except OSError as error:
            raise self._error(error, prefix) from error
        yield from (name for name in names if not _is_leftover(name))

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store.delete``. Directories left empty are removed too."""
        self._check_there()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._error(error, key) from error
            for parent in path.parents:
                if parent == self._root:
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty, or already gone: both end the climb
                    break

    def now(self) -> float:
        """See ``Store.now``: the time the file system gives a new file."""
        probe = self._root / f"{STAGE_PREFIX}{uuid.uuid4().hex}"
        try:
            probe.mkdir()
            try:
                return probe.stat().st_mtime
            finally:
                probe.rmdir()
        except OSError as error:
            raise self._error(error, self.url) from error

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """See ``Store.sweep``. A lock is never swept: the next writer of its key breaks it."""
        before = self.now() - older_than_s
        removed = 0
        for folder, names, _ in os.walk(self._root / prefix, onerror=self._heed):
            for name in [name for name in names if name.startswith(STAGE_PREFIX)]:
                names.remove(name)
                with suppress(FileNotFoundError):
                    if (Path(folder) / name).stat().st_mtime < before:
                        shutil.rmtree(Path(folder) / name, ignore_errors=True)
                        removed += 1
        return removed

    def _create(self, key: str, data: Payload | FileSlices) -> str:
        def check(path: Path) -> None:
            if path.exists():
                raise PreconditionFailed(f"{key} exists already in {self.url}")

        return self._exclusively(key, data, check)

    def _exclusively(
        self, key: str, data: Payload | FileSlices, check: Callable[[Path], None]
    ) -> str:
        """Returns the ETag, which is the digest that staging took anyway."""
        path = self._path(key)
        self._check_there()
        try:
            with _staged(path, data) as stage:
                stage.commit_exclusively(check)
                return stage.sha256
        except BucketError:
            raise
        except OSError as error:
            raise self._error(error, key) from error

    def _check_there(self) -> None:
        """A folder that is gone is a store that is away, not an empty one.

        Raises:
            StoreUnavailable: it is gone.
        """
        if not self._root.is_dir():
            raise StoreUnavailable(f"the folder of bucket {self.url} is gone; is it mounted?")

    def _error(self, error: OSError, subject: str) -> Exception:
        if isinstance(error, FileNotFoundError):
            self._check_there()
        return _store_error(error, subject)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") or "\0" in part or _is_leftover(part) for part in parts):
            raise ConfigError(f"key {key!r} is not a relative key of plain names")
        return self._root.joinpath(*parts)

    def _heed(self, error: OSError) -> None:
        """A directory that cannot be read is a fault; left out, its objects would seem deleted."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise self._error(error, str(error.filename)) from error

    def _walk(self, prefix: str) -> Iterator[Path]:
        self._check_there()
        start = self._root / prefix.rpartition("/")[0]
        for folder, names, files in os.walk(start, onerror=self._heed):
            names[:] = [name for name in names if not _is_leftover(name)]
            for name in files:
                path = Path(folder) / name
                if path.relative_to(self._root).as_posix().startswith(prefix):
                    yield path


def _staged(path: Path, data: Payload | FileSlices) -> FileLock:
    """Write and flush ``data`` beside ``path``, before any lock is taken."""
    for attempt in range(3):
        try:
            return FileLock.stage(path, data)
        except FileNotFoundError:  # a concurrent delete removed the directory while it was empty
            if attempt == 2:
                raise
            time.sleep(0.01)
    raise AssertionError("unreachable")


def _is_leftover(name: str) -> bool:
    return name.startswith(STAGE_PREFIX) or name.endswith(LOCK_SUFFIX)


def _etag(data: Payload) -> str:
    return hashlib.sha256(data).hexdigest()


def _store_error(error: OSError, subject: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"no object {subject}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreDenied(f"{subject}: {error.strerror}; check the directory's permissions")
    return StoreUnavailable(f"{subject}: {error.strerror or error}")

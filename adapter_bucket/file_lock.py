"""How one file is replaced by exactly one of many processes, on any file system.

The new content is staged in a directory of its own, ``.tmp-<id>/<id>``. Taking the lock is renaming
that directory to ``<name>.lock``: it fails while another non-empty directory has that name. The
commit is renaming ``<name>.lock/<id>`` over ``<name>``: it succeeds only while the lock is still
this one, because ``<id>`` is unique. So *holding the lock and committing are one atomic step*, and
whoever was paused, and lost the lock meanwhile, fails to commit instead of writing late.

That makes breaking a lock safe at any time, even a live one: its holder gets ``FileNotFoundError``
at the commit, has written nothing, and starts again. No clock decides anything; a waiter breaks a
lock whose holder has not changed for ``BREAK_AFTER_S`` of the waiter's own time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.file_slices import FileSlices
from adapter_bucket.pieces import sha256_of
from adapter_bucket.store import Payload

STAGE_PREFIX = ".tmp-"
LOCK_SUFFIX = ".lock"

BREAK_AFTER_S = 3.0
"""A holder needs milliseconds (read, compare, rename). Breaking a slow one costs it a retry."""

WAIT_S = 60.0
"""Longest wait for the lock, through any number of holders."""

_POLL_S = 0.003


class FileLock:
    """New content for one path, staged beside it. Use as a context manager: leaves nothing."""

    def __init__(self, path: Path, stage: Path, digest: bytes) -> None:
        self._path = path
        self._stage = stage
        self._id = stage.name.removeprefix(STAGE_PREFIX)
        self._lock = path.with_name(path.name + LOCK_SUFFIX)
        self._digest = digest

    @classmethod
    def stage(cls, path: Path, data: Payload | FileSlices) -> FileLock:
        """Write ``data`` beside ``path`` and flush it to disk."""
        token = uuid.uuid4().hex
        stage = path.with_name(f"{STAGE_PREFIX}{token}")
        path.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        digest = hashlib.sha256()
        try:
            with (stage / token).open("xb") as file:
                for chunk in data.chunks() if isinstance(data, FileSlices) else (data,):
                    file.write(chunk)
                    digest.update(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        return cls(path, stage, digest.digest())

    def __enter__(self) -> FileLock:
        return self

    @property
    def sha256(self) -> str:
        """Of the staged content, hexadecimal."""
        return self._digest.hex()

    def __exit__(self, *exc: object) -> None:
        self._release()
        shutil.rmtree(self._stage, ignore_errors=True)

    def commit(self) -> None:
        """Put the content in place, whatever is there."""
        (self._stage / self._id).replace(self._path)
        _sync_dir(self._path.parent)

    def commit_exclusively(self, check: Callable[[Path], None]) -> None:
        """Put the content in place if ``check`` allows it, with no other write in between.

        Args:
            check: Called with the path while the lock is held; raises to refuse. Called again
                if the lock was broken.

        Raises:
            StoreUnavailable: the lock could not be had for ``WAIT_S``.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            self._acquire(deadline)
            check(self._path)
            try:
                (self._lock / self._id).replace(self._path)
            except FileNotFoundError:
                if self._lost_lock():
                    continue
                # A network file system may repeat a rename whose answer it lost, and then report
                # the repetition's failure.
                if not self._in_place():
                    raise StoreUnavailable(f"the write of {self._path} got lost; repeat") from None
            _sync_dir(self._path.parent)
            return

    def _acquire(self, deadline: float) -> None:
        holder, since = "", time.monotonic()
        while not self._try_acquire():
            now, current = time.monotonic(), self._holder()
            if current != holder:
                holder, since = current, now
            elif now - since > BREAK_AFTER_S:
                self._break()
            if now > deadline:
                raise StoreUnavailable(f"{self._lock} was busy for {WAIT_S:.0f} s; repeat")
            time.sleep(_POLL_S)

    def _try_acquire(self) -> bool:
        try:
            self._stage.rename(self._lock)
            return True
        except FileNotFoundError:
            if self._stage.parent.exists() and not self._lost_lock():
                raise StoreUnavailable(f"the staged {self._path} is gone; repeat") from None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not self._lock.exists():
                raise
            # Empty: left by a process that died right after its commit, on a file system that
            # does not rename over an empty directory.
            with suppress(OSError):
                self._lock.rmdir()
        return False

    def _lost_lock(self) -> bool:
        """Whether somebody broke our lock and gave the stage back, so that we can start again."""
        for _ in range(50):  # the giving back is the second of two renames
            if self._stage.exists():
                return True
            time.sleep(_POLL_S)
        return False

    def _holder(self) -> str:
        """Id in the lock; empty if there is no lock or nobody in it."""
        try:
            return next(iter(os.listdir(self._lock)), "")
        except OSError:
            return ""

    def _break(self) -> None:
        """Move whatever lock is there away. Its content goes back to where its owner looks."""
        broken = self._lock.with_name(f"{STAGE_PREFIX}{uuid.uuid4().hex}")
        with suppress(OSError):
            self._lock.rename(broken)
            for token in os.listdir(broken):
                # A live owner finds its stage again and retries; a dead one's is swept later.
                broken.rename(self._lock.with_name(f"{STAGE_PREFIX}{token}"))
                return
            broken.rmdir()

    def _release(self) -> None:
        with suppress(OSError):
            (self._lock / self._id).unlink()
        with suppress(OSError):
            self._lock.rmdir()  # fails, rightly, once another writer has renamed its own here

    def _in_place(self) -> bool:
        try:
            with self._path.open("rb") as file:
                return sha256_of(file) == self.sha256
        except FileNotFoundError:
            return False


def _sync_dir(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Brings a trainer's checkpoint directory into the bucket, and commits it.

Owns the order of writes: the files, then the index, then the manifest, which is the commit; and of
deletions: the manifest, then the index, then the files. The schema is in ``checkpoint``.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from adapter_bucket.checkpoint import (
    CHECKPOINT_FORMAT,
    MAX_INDEX_BYTES,
    CheckpointFile,
    CheckpointIndex,
    TrainerFacts,
    check_names,
    dead_checkpoints,
    encode_index,
    entry_of,
    with_checkpoint,
)
from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from adapter_bucket.fencing import Ownership
from adapter_bucket.layout import (
    checkpoint_file_key,
    checkpoint_index_key,
    checkpoint_prefix,
    checkpoints_prefix,
    parse_checkpoint_key,
)
from adapter_bucket.manifest import CheckpointEntry, Manifest
from adapter_bucket.pieces import sha256_of
from adapter_bucket.store import Store

logger = logging.getLogger(__name__)

SMALL_BYTES = 1024 * 1024
SMALL_PARALLEL = 8
"""Files up to this size travel side by side: what they cost is round trips. Larger ones go one
after the other, in parts, so that memory stays at a few parts whatever the checkpoint's size."""

LEFTOVER_AGE_S = 3600.0
"""Age of an upload in parts from which nobody can be expected to finish it."""


class CheckpointUpload:
    """One checkpoint directory on its way. ``run`` may be called again: it goes on.

    Args:
        store: Where the run lives.
        run_id: The run.
        folder: The directory. Nothing in it may change until the upload ends: if something does,
            that is noticed, and the checkpoint fails.
        step: Optimizer steps it continues from.
        epoch: Epoch of the writer.
        trainer: What wrote it.
        should_stop: Asked between files.

    Raises:
        ConfigError: the directory holds something that cannot be stored (a link, a name).
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        folder: Path,
        *,
        step: int,
        epoch: int,
        trainer: TrainerFacts,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._folder = folder
        self._place = (step, epoch)
        self._trainer = trainer
        self._should_stop = should_stop
        self._clock = clock
        self._names = files_below(folder)
        self._done: dict[str, CheckpointFile] = {}
        self._lock = threading.Lock()

    def run(self) -> CheckpointEntry:
        """Upload what is not there yet, the index last.

        Returns:
            The entry for ``CheckpointWriter.commit``; until then no reader can see anything.

        Raises:
            StoreUnavailable: the store failed, or ``should_stop`` said so; call again to go on.
            IntegrityError: a file changed while it was read.
        """
        small = [name for name in self._names if self._path(name).stat().st_size <= SMALL_BYTES]
        with ThreadPoolExecutor(SMALL_PARALLEL, thread_name_prefix="checkpoint-put") as pool:
            for future in [pool.submit(self._put, name) for name in small]:
                future.result()
        for name in self._names:
            self._put(name)
        self._check_stop()
        step, epoch = self._place
        index = CheckpointIndex(
            format_version=CHECKPOINT_FORMAT,
            run_id=self._run_id,
            step=step,
            epoch=epoch,
            trainer=self._trainer,
            files={name: self._done[name] for name in self._names},
        )
        data = encode_index(index)
        self._create(
            checkpoint_index_key(self._run_id, step, epoch),
            lambda key: self._store.create(key, data),
        )
        return entry_of(index, data, created_at=self._clock())

    def _path(self, name: str) -> Path:
        return self._folder.joinpath(*name.split("/"))

    def _put(self, name: str) -> None:
        if name in self._done:
            return
        self._check_stop()
        path = self._path(name)
        before = _identity(path)
        with path.open("rb") as file:
            digest = sha256_of(file)
        size = before[1]
        self._create(
            checkpoint_file_key(self._run_id, *self._place, name),
            lambda key: self._store.upload(key, path, size=size),
        )
        if _identity(path) != before:
            raise IntegrityError(
                f"{path} was written again while it was uploaded; checkpoint {self._place[0]} is "
                "given up, the next one is uploaded in its place"
            )
        with self._lock:
            self._done[name] = CheckpointFile(size=size, sha256=digest)

    def _check_stop(self) -> None:
        if self._should_stop():
            raise StoreUnavailable(f"the upload of checkpoint {self._place[0]} was stopped")

    def _create(self, key: str, create: Callable[[str], object]) -> None:
        try:
            create(key)
        except PreconditionFailed:
            # Keys of this epoch are ours alone and nothing names them yet: it is what an attempt
            # left whose answer was lost.
            self._store.delete([key])
            create(key)


class CheckpointWriter:
    """Commits checkpoints for the owner of a run, and deletes those that fell out.

    Args:
        store: Where the run lives.
        owner: ``RunWriter.ownership``.
        limit: How many checkpoints stay, at least 1.
    """

    def __init__(self, store: Store, owner: Ownership, *, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"a checkpoint limit of {limit} keeps none; use at least 1")
        self._store = store
        self._owner = owner
        self._limit = limit

    @property
    def epoch(self) -> int:
        """Epoch of the writer, part of the keys."""
        return self._owner.manifest.writer.epoch

    @property
    def run_id(self) -> str:
        """The run."""
        return self._owner.manifest.run_id

    def confirm(self) -> None:
        """Ask the bucket whether the run is still ours, before gigabytes travel for nothing.

        Raises:
            FencedError: it is not.
        """
        self._owner.confirm()

    def commit(self, entry: CheckpointEntry) -> None:
        """Put a complete checkpoint into the manifest, then delete what fell out of it.

        Guarantees: when it returns, a reader of the manifest finds the checkpoint, whole. A fenced
        writer commits nothing. May be called again after ``StoreUnavailable``.

        Raises:
            FencedError: another writer owns the run.
            ConfigError: the checkpoint is not newer than the newest one.
        """
        dropped: list[CheckpointEntry] = []

        def add(manifest: Manifest) -> Manifest:
            nonlocal dropped
            changed, dropped = with_checkpoint(manifest, entry, limit=self._limit)
            return changed

        self._owner.write(add)
        for old in dropped:
            try:
                delete_checkpoint(self._store, self.run_id, old.step, old.epoch)
            except BucketError as error:
                logger.warning(
                    "run %s: checkpoint %d stays until the next clean-up: %s",
                    self.run_id,
                    old.step,
                    error,
                )

    def clean(self) -> int:
        """Remove what crashed or fenced writers left; returns how many checkpoints that were."""
        run_id = self.run_id
        prefix = checkpoints_prefix(run_id)
        keys = map(parse_checkpoint_key, self._store.list(prefix))
        found = {key[1:] for key in keys if key is not None and key[0] == run_id}
        dead = dead_checkpoints(found, self._owner.manifest)
        for step, epoch in dead:
            delete_checkpoint(self._store, run_id, step, epoch)
        self._store.sweep(prefix, older_than_s=LEFTOVER_AGE_S)
        return len(dead)


def delete_checkpoint(store: Store, run_id: str, step: int, epoch: int) -> None:
    """Delete one checkpoint that no manifest names, its index first."""
    index_key = checkpoint_index_key(run_id, step, epoch)
    prefix = checkpoint_prefix(run_id, step, epoch)
    keys = {*store.list(prefix), *_indexed(store, index_key, prefix)}
    store.delete([index_key])
    store.delete(sorted(keys))


def files_below(folder: Path) -> list[str]:
    """Relative names of all files below a directory, sorted.

    Raises:
        ConfigError: it holds no file, a link, a special file, or a name that cannot be stored.
    """
    names: list[str] = []
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where) / name
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(
                    f"{path} is a link or a special file: a checkpoint in a bucket holds plain "
                    "files only. Write it there as a file, or set bucket_checkpoints=False"
                )
        names.extend((Path(where) / name).relative_to(folder).as_posix() for name in files)
    if not names:
        raise ConfigError(f"{folder} holds no files: it is no checkpoint")
    check_names(names)
    return sorted(names)


def _indexed(store: Store, index_key: str, prefix: str) -> Iterable[str]:
    """Keys that the index names: a listing may be late."""
    with suppress(ObjectNotFound, IntegrityError, ValueError):
        stored = store.get(index_key, max_bytes=MAX_INDEX_BYTES)
        index = CheckpointIndex.model_validate_json(getattr(stored, "data", b""))
        return [prefix + name for name in index.files]
    return ()


def _identity(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file was written, also in place."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns

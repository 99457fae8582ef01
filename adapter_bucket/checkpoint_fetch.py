"""Brings a checkpoint from the bucket to a local directory, complete and verified or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapter_bucket.checkpoint import (
    MAX_INDEX_BYTES,
    CheckpointFile,
    CheckpointIndex,
    decode_index,
)
from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    IntegrityError,
    NotPublished,
    ObjectNotFound,
    StoreUnavailable,
)
from adapter_bucket.fencing import read_manifest
from adapter_bucket.layout import checkpoint_dir, checkpoint_file_key, checkpoint_index_key
from adapter_bucket.manifest import CheckpointEntry
from adapter_bucket.pieces import sha256_of
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store, StoredObject

logger = logging.getLogger(__name__)

_ATTEMPTS = 3

PARALLEL = 4
"""Files in flight; a large one travels in parallel ranges besides."""

STAGE_PREFIX = "_fetching-checkpoint-"
ASIDE_PREFIX = "_replaced-checkpoint-"
"""A leading underscore keeps both from being pushed to the Hub with the output directory."""

STALE_STAGE_S = 3600.0
"""A staged download older than this belongs to a process that was killed."""


def read_index(store: Store, run_id: str, entry: CheckpointEntry) -> CheckpointIndex:
    """Read the list of a checkpoint's files.

    Raises:
        NotPublished: it is gone: a newer checkpoint took its place. Read the manifest again.
        IntegrityError: it is not the one that the manifest names.
    """
    key = checkpoint_index_key(run_id, entry.step, entry.epoch)
    try:
        found = store.get(key, max_bytes=MAX_INDEX_BYTES)
    except ObjectNotFound:
        raise _gone(store, run_id, entry) from None
    if not isinstance(found, StoredObject):
        raise StoreUnavailable(f"{store.url} answered 'not modified' to an unconditional get")
    return decode_index(found.data, run_id=run_id, entry=entry)


def fetch_newest(
    store: Store, run_id: str, output_dir: Path, *, signing: SigningKeys | None = None
) -> tuple[CheckpointEntry, Path] | None:
    """Bring the newest good checkpoint of a run to ``output_dir``.

    One that is damaged in the bucket, or lost although the manifest goes on naming it, is passed
    over for the one before, with an error in the log: both are whole states of the run, and an
    older one costs steps, not truth.

    Returns:
        Its entry and its directory, or ``None`` if the run has no checkpoint, or does not exist.

    Raises:
        IntegrityError: every checkpoint of the run is damaged, or the manifest is; with signing
            keys, also if it is not signed.
        NotPublished: the checkpoints kept vanishing: another trainer of the run is alive. Or all
            are lost.
        ConfigError, StoreUnavailable: see ``fetch_checkpoint``.
    """
    keys = SigningKeys.from_env() if signing is None else signing
    seen: list[CheckpointEntry] = []
    for attempt in range(_ATTEMPTS):
        found = read_manifest(store, run_id, keys)
        if found is None or not found.manifest.checkpoints:
            return None
        entries = found.manifest.checkpoints
        # What is gone and still named was not replaced by a newer one: it is lost.
        bad = (IntegrityError, NotPublished) if entries == seen else (IntegrityError,)
        try:
            return _first_good(store, run_id, entries, output_dir, bad=bad)
        except NotPublished:
            if attempt == _ATTEMPTS - 1:
                raise
        seen = entries
    raise AssertionError("unreachable")


def _first_good(
    store: Store,
    run_id: str,
    entries: list[CheckpointEntry],
    output_dir: Path,
    *,
    bad: tuple[type[BucketError], ...],
) -> tuple[CheckpointEntry, Path]:
    for number, entry in enumerate(reversed(entries), start=1):
        try:
            return entry, fetch_checkpoint(store, run_id, entry, output_dir)
        except bad as error:
            if number == len(entries):
                raise
            logger.error("%s. The checkpoint before it is taken", error)
    raise AssertionError("unreachable")


def fetch_checkpoint(store: Store, run_id: str, entry: CheckpointEntry, output_dir: Path) -> Path:
    """Bring one checkpoint to ``<output_dir>/checkpoint-<step>``.

    Guarantees: the directory appears under its final name only after size and sha256 of every file
    were checked. One that is there already is used if it holds exactly these files; another one is
    moved aside, never deleted.

    Returns:
        The directory.

    Raises:
        NotPublished: its objects are gone: a newer checkpoint took its place.
        IntegrityError: an object is not what the index promised. Nothing is left on disk.
        ConfigError: the disk has not enough room.
        StoreUnavailable: the store or the local disk failed; call again.
    """
    index = read_index(store, run_id, entry)
    final = output_dir / checkpoint_dir(entry.step)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if final.is_dir() and _holds(final, index):
            return final
        _remove_stages(output_dir)
        _check_room(output_dir, index)
        stage = output_dir / f"{STAGE_PREFIX}{uuid.uuid4().hex}"
        stage.mkdir(mode=0o700)
        try:
            _download(store, index, entry, stage)
            _put_in_place(stage, final, index)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise StoreUnavailable(
            f"checkpoint {entry.step} of run {run_id!r} cannot be kept in {output_dir}: "
            f"{error.strerror or error}"
        ) from error
    return final


def _download(store: Store, index: CheckpointIndex, entry: CheckpointEntry, stage: Path) -> None:
    def bring(name: str) -> None:
        # The name was checked part by part when the index was read, and the stage is a new
        # directory of ours, without links: it cannot lead out of it.
        path = stage.joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        key = checkpoint_file_key(index.run_id, index.step, index.epoch, name)
        expected = index.files[name]
        try:
            store.download(key, path, size=expected.size)
        except ObjectNotFound:
            raise _gone(store, index.run_id, entry) from None
        if not _matches(path, expected):
            raise IntegrityError(
                f"{key} has not the sha256 that the index of its checkpoint promises "
                f"({expected.sha256[:12]}…); the checkpoint is not used"
            )

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="checkpoint-get") as pool:
        futures = [pool.submit(bring, name) for name in index.files]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _holds(folder: Path, index: CheckpointIndex) -> bool:
    found = {
        (Path(where) / name).relative_to(folder).as_posix()
        for where, _, files in os.walk(folder)
        for name in files
    }
    return found == set(index.files) and all(
        _matches(folder.joinpath(*name.split("/")), file) for name, file in index.files.items()
    )


def _matches(path: Path, expected: CheckpointFile) -> bool:
    if path.is_symlink() or path.stat().st_size != expected.size:
        return False
    with path.open("rb") as file:
        return sha256_of(file) == expected.sha256


def _put_in_place(stage: Path, final: Path, index: CheckpointIndex) -> None:
    if final.exists():
        _put_aside(final)
    try:
        os.rename(stage, final)
    except OSError:  # another host fetched it into the same shared directory first
        if not (final.is_dir() and _holds(final, index)):
            raise


def _put_aside(folder: Path) -> None:
    """Keep what was there under another name, that no trainer takes for a checkpoint."""
    aside = folder.with_name(
        f"{ASIDE_PREFIX}{folder.name.rpartition('-')[2]}-{uuid.uuid4().hex[:8]}"
    )
    folder.rename(aside)
    logger.warning("%s was another checkpoint than the bucket's; it is now %s", folder, aside)


def _remove_stages(output_dir: Path) -> None:
    """What a process left that was killed while it fetched."""
    before = time.time() - STALE_STAGE_S
    for stage in output_dir.glob(f"{STAGE_PREFIX}*"):
        if stage.stat().st_mtime < before:
            shutil.rmtree(stage, ignore_errors=True)


def _check_room(output_dir: Path, index: CheckpointIndex) -> None:
    free = shutil.disk_usage(output_dir).free
    if free < index.size:
        raise ConfigError(
            f"checkpoint {index.step} of run {index.run_id!r} has {index.size} bytes, {output_dir} "
            f"has room for {free}: free some, or choose another output_dir"
        )


def _gone(store: Store, run_id: str, entry: CheckpointEntry) -> NotPublished:
    return NotPublished(
        f"checkpoint {entry.step} of run {run_id!r} is gone from {store.url}: a newer one took its "
        "place, or somebody deleted it"
    )

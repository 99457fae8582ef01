"""The reading side of the contract: find runs, poll a manifest, fetch a version.

Owns what a reader may believe: a manifest goes forward only, and a version directory appears under
its final name complete and verified, or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from adapter_bucket.adapter_files import canonical_config
from adapter_bucket.errors import (
    ConfigError,
    IntegrityError,
    NotPublished,
    ObjectNotFound,
    StoreUnavailable,
)
from adapter_bucket.layout import (
    CONFIG_FILE,
    RUNS_PREFIX,
    WEIGHTS_FILE,
    check_run_id,
    file_key,
    manifest_key,
    version_dir,
)
from adapter_bucket.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    VersionEntry,
    decode,
)
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import NotModified, Store
from adapter_bucket.verified import VERIFIED, verify_file

logger = logging.getLogger(__name__)

STALE_STAGE_S = 3600.0
"""A staged download older than this belongs to a process that was killed."""


def discover_runs(store: Store) -> list[str]:
    """Ids of the runs in the bucket, sorted. Names that are not run ids are passed over."""
    runs: list[str] = []
    for name in store.list_dirs(RUNS_PREFIX):
        try:
            runs.append(check_run_id(name))
        except ConfigError:
            continue
    return sorted(runs)


class RunReader:
    """Follows one run's manifest. Not thread-safe: one thread polls.

    A poll costs one conditional GET; an unchanged manifest is a 304.

    Args:
        store: Where the run lives.
        run_id: The run.
        signing: Keys for the manifest; ``None`` reads ``BUCKET_LORA_SIGNING_KEYS``. With keys, a
            manifest that none of them signed is refused.
    """

    def __init__(self, store: Store, run_id: str, *, signing: SigningKeys | None = None) -> None:
        self._store = store
        self._run_id = check_run_id(run_id)
        self._signing = SigningKeys.from_env() if signing is None else signing
        self._etag: str | None = None
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The last good manifest, or ``None`` before the first one."""
        return self._manifest

    def poll(self) -> Manifest | None:
        """Read the manifest if it changed.

        Guarantees: the manifests returned never go back in (epoch, latest).

        Returns:
            The new manifest, or ``None`` if it is the one of the last poll.

        Raises:
            NotPublished: the run has no manifest (yet, or any more).
            IntegrityError: the object is not a valid manifest, or is older than one seen before;
                ``manifest`` stays the last good one.
            StoreUnavailable: the store failed; poll again.
        """
        try:
            found = self._store.get(
                manifest_key(self._run_id), if_none_match=self._etag, max_bytes=MAX_MANIFEST_BYTES
            )
        except ObjectNotFound:
            self._etag = None
            raise NotPublished(
                f"run {self._run_id!r} has no manifest in {self._store.url}"
            ) from None
        if isinstance(found, NotModified) or found.etag == self._etag:
            return None
        manifest = decode(found.data, run_id=self._run_id, signing=self._signing)
        if self._manifest is not None and _order(manifest) < _order(self._manifest):
            raise IntegrityError(
                f"manifest of run {self._run_id!r} went back from (epoch, latest) "
                f"{_order(self._manifest)} to {_order(manifest)}; keeping the newer one"
            )
        self._etag = found.etag
        self._manifest = manifest
        return manifest


def fetch_version(
    store: Store,
    run_id: str,
    entry: VersionEntry,
    cache_dir: Path,
    *,
    max_bytes: int | None = None,
) -> Path:
    """Bring one version to local disk as a plain PEFT adapter directory.

    Guarantees: the directory appears under its final name only after size and sha256 of every file
    were checked. A directory that is there already is believed after its digests were checked once
    by this process, as long as size and time of its files stay the same; a damaged one is replaced.

    Args:
        store: Where the run lives.
        run_id: The run.
        entry: The version's entry in the manifest.
        cache_dir: Local directory; the version goes to ``<cache_dir>/<run_id>/v00000012``.
        max_bytes: Refuse a larger version, so that a manifest cannot fill the disk.

    Returns:
        The directory.

    Raises:
        NotPublished: the objects are gone: the version fell out of retention. Take the newest one.
        IntegrityError: an object is not what the manifest promised, or too large, or the version
            is of a kind this reader does not know. Nothing is left on disk.
        StoreUnavailable: the store or the local disk failed; call again.
    """
    _check_fetchable(run_id, entry, max_bytes)
    final = cache_dir / check_run_id(run_id) / version_dir(entry.version)
    try:
        if final.is_dir():
            if VERIFIED.holds(final, entry):
                return final
            logger.warning("%s is damaged; it is fetched again", final)
            _put_aside(final)
        _remove_stale_stages(final.parent)
        return _fetch_into(store, run_id, entry, final)
    except OSError as error:
        raise StoreUnavailable(
            f"version {entry.version} of run {run_id!r} cannot be kept in {cache_dir}: "
            f"{error.strerror or error}. Free space there, or choose another directory"
        ) from error


def _check_fetchable(run_id: str, entry: VersionEntry, max_bytes: int | None) -> None:
    if set(entry.files) != {CONFIG_FILE, WEIGHTS_FILE}:
        raise IntegrityError(
            f"version {entry.version} of run {run_id!r} is of kind {entry.kind[:40]!r}, which this "
            "release cannot load; upgrade it"
        )
    if max_bytes is not None and entry.weights.size > max_bytes:
        raise IntegrityError(
            f"version {entry.version} of run {run_id!r} has {entry.weights.size} bytes, the limit "
            f"is {max_bytes}"
        )


def _fetch_into(store: Store, run_id: str, entry: VersionEntry, final: Path) -> Path:
    stage = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    stage.mkdir(parents=True)
    try:
        _stage_config(entry, stage / CONFIG_FILE)
        key = file_key(run_id, entry.version, WEIGHTS_FILE)
        weights = stage / WEIGHTS_FILE
        try:
            store.download(key, weights, size=entry.weights.size)
        except ObjectNotFound:
            raise NotPublished(
                f"version {entry.version} of run {run_id!r} is gone from {store.url}: it fell out "
                "of retention"
            ) from None
        verify_file(weights, entry.weights, key)
        try:
            os.rename(stage, final)
        except OSError:
            if not final.is_dir():  # else another process fetched it first: same bytes
                raise
        VERIFIED.remember(final, entry)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return final


def _put_aside(folder: Path) -> None:
    """Move a damaged directory away in one step, then remove it."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_stale_stages(folder: Path) -> None:
    if not folder.is_dir():
        return
    before = time.time() - STALE_STAGE_S
    for stage in folder.glob(".v*"):
        with suppress(FileNotFoundError):  # another process has just finished it
            if stage.stat().st_mtime < before:
                shutil.rmtree(stage, ignore_errors=True)


def _order(manifest: Manifest) -> tuple[int, int]:
    return manifest.writer.epoch, manifest.latest


def _stage_config(entry: VersionEntry, path: Path) -> None:
    expected = entry.files[CONFIG_FILE]
    try:
        data = canonical_config(entry.adapter_config)
    except ConfigError as error:
        raise IntegrityError(f"adapter config of version {entry.version}: {error}") from None
    if len(data) != expected.size or hashlib.sha256(data).hexdigest() != expected.sha256:
        raise IntegrityError(
            f"adapter config of version {entry.version} does not match its own digest in the "
            "manifest; the version is not used"
        )
    path.write_bytes(data)

"""The writing side of the contract: claim a run, commit versions in order, close the run.

Owns the commit order and the fencing. Adapter objects are written first, in parallel, with
create-only puts; the manifest follows with a compare-and-swap put and is the commit. Whatever
happens between two writes, a reader sees the old manifest or the new one, and every version a
manifest names is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adapter_bucket.base_model import BaseModelRef, mismatch
from adapter_bucket.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
)
from adapter_bucket.layout import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_version,
    file_key,
    manifest_key,
)
from adapter_bucket.manifest import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    RunState,
    VersionEntry,
    Writer,
    decode,
    encode,
)
from adapter_bucket.retention import split
from adapter_bucket.store import Payload, Store, StoredObject

logger = logging.getLogger(__name__)


def canonical_config(adapter_config: Mapping[str, Any]) -> bytes:
    """Bytes of ``adapter_config.json``: a function of the content alone.

    The manifest carries the config inline; a reader writes the file with this function and checks
    it against the digest, so the file itself need not be fetched.
    """
    return json.dumps(adapter_config, sort_keys=True, indent=2, ensure_ascii=True).encode()


class RunWriter:
    """The one writer of a run. Not thread-safe: one thread publishes.

    Make one with ``claim``. After ``FencedError`` it must not be used any more.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        etag: str,
        *,
        keep_every: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._etag = etag
        self._keep_every = keep_every
        self._clock = clock

    @classmethod
    def claim(
        cls,
        store: Store,
        run_id: str,
        *,
        base_model: BaseModelRef,
        window: int,
        writer_id: str,
        takeover: bool = False,
        keep_every: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> RunWriter:
        """Become the writer of a run: create it, or take over an ended or abandoned one.

        Guarantees: when it returns, every earlier writer of the run is fenced. Version numbers go
        on from the bucket.

        Args:
            store: Where the run lives.
            run_id: See ``layout.check_run_id``.
            base_model: What the adapters are trained on. A run keeps its base model for ever.
            window: How many versions replicas keep ready (``max_staleness + 2``).
            writer_id: Free text that names this process to people.
            takeover: Also take over a run that is still marked running.
            keep_every: Never delete versions divisible by this; 0 deletes all old ones.
            clock: Unix time, seconds.

        Raises:
            FencedError: the run is marked running and ``takeover`` is false, or another writer
                claimed it in the same moment. The message names that writer.
            ConfigError: the run has another base model.
            IntegrityError: the manifest in the bucket cannot be read.
        """
        key = manifest_key(run_id)
        found = _read_manifest(store, run_id)
        if found is None:
            first = Manifest(
                format_version=FORMAT_VERSION,
                run_id=run_id,
                base_model=base_model,
                writer=Writer(id=writer_id, epoch=1),
                state=RunState.RUNNING,
                window=window,
                latest=0,
                versions=[],
            )
            try:
                etag = store.create(key, encode(first))
            except PreconditionFailed:
                raise FencedError(
                    f"run {run_id!r} in {store.url} was created by another writer just now; "
                    "choose another run id"
                ) from None
            return cls(store, first, etag, keep_every=keep_every, clock=clock)
        manifest, etag = found
        _check_takeover(store, manifest, base_model, takeover=takeover)
        taken = manifest.model_copy(
            update={
                "base_model": base_model,
                "writer": Writer(id=writer_id, epoch=manifest.writer.epoch + 1),
                "state": RunState.RUNNING,
                "window": window,
            }
        )
        writer = cls(store, manifest, etag, keep_every=keep_every, clock=clock)
        writer._commit(taken)
        return writer

    @property
    def manifest(self) -> Manifest:
        """The last manifest this writer committed."""
        return self._manifest

    def publish(
        self,
        version: int,
        *,
        step: int,
        weights: Payload,
        adapter_config: Mapping[str, Any],
        rank: int,
        dtype: str,
    ) -> VersionEntry:
        """Commit one version.

        Guarantees: when it returns, every reader that polls can read all of the version; when it
        raises, the version is not in the manifest and a later call may try again with the same
        bytes.

        Args:
            version: Greater than every version committed before.
            step: Optimizer step of the snapshot.
            weights: The safetensors file.
            adapter_config: Content of ``adapter_config.json``.
            rank: Largest rank of any module.
            dtype: dtype of the tensors, without ``torch.``.

        Raises:
            ConfigError: the version is not greater than the latest one.
            FencedError: another writer took the run over. Nothing of this version is visible.
            IntegrityError: objects of this version exist with other bytes.
            StoreUnavailable: the store failed; the call may be repeated.
        """
        check_version(version)
        if version <= self._manifest.latest:
            raise ConfigError(
                f"version {version} of run {self._manifest.run_id!r} is not above the latest "
                f"published one, {self._manifest.latest}: a version is never published twice"
            )
        files: dict[str, Payload] = {
            CONFIG_FILE: canonical_config(adapter_config),
            WEIGHTS_FILE: weights,
        }
        entry = VersionEntry(
            version=version,
            step=step,
            created_at=self._clock(),
            files={name: _describe(data) for name, data in files.items()},
            rank=rank,
            dtype=dtype,
            adapter_config=dict(adapter_config),
        )
        self._put_objects(version, files)
        kept, dropped = split(
            [*self._manifest.versions, entry],
            window=self._manifest.window,
            keep_every=self._keep_every,
        )
        self._commit(self._manifest.model_copy(update={"latest": version, "versions": kept}))
        # After the commit: from here on no manifest names them, and readers of the previous
        # manifest had the grace version's time to finish.
        self._delete_versions(dropped)
        return entry

    def close(self, state: RunState) -> None:
        """Mark the run finished or interrupted. The versions stay.

        Raises:
            FencedError: another writer took the run over; its state stays as it is.
        """
        self._commit(self._manifest.model_copy(update={"state": state}))

    def _put_objects(self, version: int, files: Mapping[str, Payload]) -> None:
        with ThreadPoolExecutor(len(files), thread_name_prefix="bucket-put") as pool:
            futures = [
                pool.submit(self._put_object, file_key(self._manifest.run_id, version, name), data)
                for name, data in files.items()
            ]
        for future in futures:
            future.result()

    def _put_object(self, key: str, data: Payload) -> None:
        try:
            self._store.create(key, data)
        except PreconditionFailed:
            # Ours from an attempt whose answer was lost, or a leftover of a crashed writer.
            stored = self._store.get(key)
            if isinstance(stored, StoredObject) and stored.data == bytes(data):
                return
            raise IntegrityError(
                f"{key} exists in {self._store.url} with other bytes: a crashed writer left it. "
                "Publish the next version number instead"
            ) from None

    def _commit(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.run_id)
        data = encode(manifest)
        try:
            self._etag = self._store.replace(key, data, etag=self._etag)
        except PreconditionFailed:
            # A retried request whose first attempt succeeded meets its own bytes here.
            found = self._store.get(key, max_bytes=MAX_MANIFEST_BYTES)
            if isinstance(found, StoredObject) and found.data == data:
                self._etag = found.etag
            else:
                raise self._fenced() from None
        except ObjectNotFound:
            raise self._fenced() from None
        self._manifest = manifest

    def _fenced(self) -> FencedError:
        run_id = self._manifest.run_id
        try:
            found = _read_manifest(self._store, run_id)
        except IntegrityError:
            found = None
        owner = (
            f"writer {found[0].writer.id!r} (epoch {found[0].writer.epoch}) owns it now"
            if found
            else "its manifest was deleted or damaged"
        )
        return FencedError(
            f"run {run_id!r} in {self._store.url} was taken from this writer "
            f"({self._manifest.writer.id!r}, epoch {self._manifest.writer.epoch}): {owner}. "
            "Nothing was published. Stop this trainer, or give it a run id of its own"
        )

    def _delete_versions(self, entries: list[VersionEntry]) -> None:
        run_id = self._manifest.run_id
        for entry in entries:
            # The config first: a version without it is not loadable, so a crash between the two
            # deletes leaves nothing that looks whole.
            self._store.delete(file_key(run_id, entry.version, name) for name in ADAPTER_FILES)


def _read_manifest(store: Store, run_id: str) -> tuple[Manifest, str] | None:
    try:
        found = store.get(manifest_key(run_id), max_bytes=MAX_MANIFEST_BYTES)
    except ObjectNotFound:
        return None
    assert isinstance(found, StoredObject)
    return decode(found.data, run_id=run_id), found.etag


def _check_takeover(
    store: Store, manifest: Manifest, base_model: BaseModelRef, *, takeover: bool
) -> None:
    if manifest.state is RunState.RUNNING and not takeover:
        raise FencedError(
            f"run {manifest.run_id!r} in {store.url} is marked running by writer "
            f"{manifest.writer.id!r} (epoch {manifest.writer.epoch}, latest version "
            f"{manifest.latest}). If that trainer is gone, take the run over; if it is alive, "
            "choose another run id"
        )
    if difference := mismatch(manifest.base_model, base_model):
        raise ConfigError(
            f"run {manifest.run_id!r} in {store.url} cannot change its base model: "
            f"{difference.replace('this server serves', 'this trainer has')}. "
            "Choose another run id"
        )


def _describe(data: Payload) -> FileEntry:
    return FileEntry(size=memoryview(data).nbytes, sha256=hashlib.sha256(data).hexdigest())

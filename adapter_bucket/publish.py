"""The writing side of the contract: claim a run, commit versions in order, close the run.

Owns the commit order. Adapter objects are written first, with create-only puts; the manifest
follows with a compare-and-swap put (``fencing``) and is the commit. Whatever happens between two
writes, a reader sees the old manifest or the new one, and every version it names is complete.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from adapter_bucket.adapter_files import canonical_config, check_adapter
from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.claim import claim_run, versions_with_objects
from adapter_bucket.errors import BucketError, ConfigError, IntegrityError
from adapter_bucket.fencing import Ownership
from adapter_bucket.layout import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_version,
    file_key,
)
from adapter_bucket.manifest import Manifest, RunState, VersionEntry, brief
from adapter_bucket.probe import Probe
from adapter_bucket.retention import dead_versions, split
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Payload, Store
from adapter_bucket.upload import describe, put_version

__all__ = ["RunWriter", "canonical_config"]

logger = logging.getLogger(__name__)


class RunWriter:
    """The one writer of a run. Not thread-safe: one thread publishes.

    Make one with ``claim``. After ``FencedError`` it must not be used any more.
    """

    def __init__(
        self,
        store: Store,
        owner: Ownership,
        *,
        keep_every: int = 0,
        milestones: Collection[int] = (),
        check: bool = True,
        background: Executor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._owner = owner
        self._keep_every = keep_every
        self._milestones = frozenset(milestones)
        self._check = check
        self._clock = clock
        self._floor = owner.manifest.latest
        self._closed = False
        self._tried: dict[int, str] = {}
        self._highest_tried = 0
        self._reaper = background or ThreadPoolExecutor(1, thread_name_prefix="bucket-reaper")

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
        milestones: Collection[int] = (),
        signing: SigningKeys | None = None,
        check: bool = True,
        background: Executor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> RunWriter:
        """Become the writer of a run: create it, or take over an ended or abandoned one.

        Guarantees: when it returns, every earlier writer of the run is fenced. Version numbers go
        on from the bucket: publish ``next_version`` next.

        Args:
            store: Where the run lives.
            run_id: See ``layout.check_run_id``.
            base_model: What the adapters are trained on. A run keeps its base model for ever.
            window: How many versions replicas keep ready (``max_staleness + 2``).
            writer_id: Free text that names this process to people.
            takeover: Also take over a run that is still marked running.
            keep_every: Never delete versions divisible by this; 0 deletes all old ones.
            milestones: Versions never deleted, whatever their number.
            signing: Keys for the manifest; ``None`` reads ``BUCKET_LORA_SIGNING_KEYS``.
            check: Refuse to publish adapters that cannot be served as they are.
            background: Runs deletions, and is shut down by ``close``; ``None`` starts a thread.
            clock: Unix time, seconds.

        Raises:
            FencedError: the run is marked running and ``takeover`` is false, or another writer
                claimed it in the same moment. The message names that writer.
            ConfigError: the run has another base model, or was deleted.
            IntegrityError: the manifest in the bucket cannot be read.
            StoreUnavailable: the store failed; claim again. The run is not left marked running by
                this call, unless the store takes no write either.
        """
        owner = claim_run(
            store,
            run_id,
            base_model=base_model,
            window=window,
            writer_id=writer_id,
            takeover=takeover,
            signing=SigningKeys.from_env() if signing is None else signing,
        )
        writer = cls(
            store,
            owner,
            keep_every=keep_every,
            milestones=milestones,
            check=check,
            background=background,
            clock=clock,
        )
        writer._look_for_orphans()
        return writer

    @property
    def manifest(self) -> Manifest:
        """The manifest as this writer last committed it."""
        return self._owner.manifest

    @property
    def next_version(self) -> int:
        """Lowest version number for new bytes: above the latest, and above what has objects."""
        return max(self._floor, self.manifest.latest, self._highest_tried) + 1

    def publish(
        self,
        version: int,
        *,
        step: int,
        weights: Payload,
        adapter_config: Mapping[str, Any],
        rank: int,
        dtype: str,
        probe: Probe | None = None,
    ) -> VersionEntry:
        """Commit one version.

        Guarantees: when it returns, every reader that polls can read all of the version. When it
        raises ``StoreUnavailable`` the version may or may not be in the manifest; the same call
        with the same bytes finishes it either way. Any other error: it is not.

        Args:
            version: Greater than every version committed before.
            step: Optimizer step of the snapshot; 0 is the untrained adapter.
            weights: The safetensors file. Not copied; must not change during the call.
            adapter_config: Content of ``adapter_config.json``, plain JSON values.
            rank: Largest rank of any module.
            dtype: dtype of the tensors, without ``torch.``.
            probe: What a replica must compute before the version is ready there; see ``probe``.

        Raises:
            ConfigError: the version is not greater than the latest one, or the config names a
                feature that vLLM does not serve.
            FencedError: another writer took the run over. Nothing of this version is visible.
            IntegrityError: the adapter is broken (names, ranks, NaN, untrained B), or objects of
                this version exist with other bytes.
            StoreUnavailable: the store failed; the call may be repeated.
        """
        check_version(version)
        config = canonical_config(adapter_config)
        files: dict[str, Payload] = {CONFIG_FILE: config, WEIGHTS_FILE: weights}
        try:
            entry = VersionEntry(
                version=version,
                step=step,
                created_at=self._clock(),
                files={name: describe(data) for name, data in files.items()},
                rank=rank,
                dtype=dtype,
                adapter_config=json.loads(config),
                probe=probe,
            )
        except ValidationError as error:
            raise ConfigError(f"version {version} cannot be published: {brief(error)}") from None
        self._check_order(entry)
        if self._check:
            check_adapter(entry, weights)
        self._put_files(entry, files)
        dropped: list[VersionEntry] = []

        def add(manifest: Manifest) -> Manifest:
            nonlocal dropped
            dropped = []
            known = manifest.entry(version)
            if known is not None and known.files == entry.files:
                return manifest  # the commit of an attempt whose answer was lost
            kept, dropped = split(
                [*manifest.versions, entry],
                window=manifest.window,
                keep_every=self._keep_every,
                milestones=self._milestones,
            )
            return manifest.model_copy(update={"latest": version, "versions": kept})

        self._owner.write(add)
        self._tried = {number: digest for number, digest in self._tried.items() if number > version}
        # After the commit: from here on no manifest names them, and readers of the previous
        # manifest had the grace version's time to finish.
        self._reap(entry.version for entry in dropped)
        return self.manifest.entry(version) or entry

    def close(self, state: RunState) -> None:
        """Mark the run finished or interrupted, and wait for pending deletions. Versions stay.

        Raises:
            FencedError: another writer took the run over; its state stays as it is.
        """
        self._closed = True
        try:
            self._owner.write(
                lambda manifest: (
                    manifest
                    if manifest.state is state
                    else manifest.model_copy(update={"state": state})
                )
            )
        finally:
            self._reaper.shutdown(wait=True)

    @property
    def ownership(self) -> Ownership:
        """Its right to write the manifest, for checkpoints."""
        return self._owner

    def _check_order(self, entry: VersionEntry) -> None:
        run_id, version = self.manifest.run_id, entry.version
        if self._closed:
            raise ConfigError(f"run {run_id!r} is closed; claim it again to publish to it")
        known = self.manifest.entry(version)
        if known is not None and known.files == entry.files:
            return
        if version <= self.manifest.latest:
            raise ConfigError(
                f"version {version} of run {run_id!r} is not above the latest published one, "
                f"{self.manifest.latest}: a version is never published twice"
            )

    def _put_files(self, entry: VersionEntry, files: Mapping[str, Payload]) -> None:
        run_id, version = self.manifest.run_id, entry.version
        first_try = self._tried.setdefault(version, entry.weights.sha256) == entry.weights.sha256
        self._highest_tried = max(self._highest_tried, version)
        try:
            put_version(self._store, run_id, version, files)
        except IntegrityError:
            self._owner.confirm()  # the objects may be the new owner's: then that is the news
            if not first_try or version <= max(self._floor, self.manifest.latest):
                raise
            # Nobody had used this number when we claimed the run: a writer that lost it wrote
            # late, and can never commit. Whoever claims the run from now on sees these objects,
            # or none, and so never has this number's objects deleted by us.
            logger.warning("run %s: version %d of a fenced writer is replaced", run_id, version)
            self._store.delete(file_key(run_id, version, name) for name in ADAPTER_FILES)
            put_version(self._store, run_id, version, files)

    def _look_for_orphans(self) -> None:
        """One listing per claim: what a crashed writer left decides the next version's number."""
        found = versions_with_objects(self._store, self._owner)
        named = {entry.version for entry in self.manifest.versions}
        self._floor = max(found, default=0)
        self._reap(dead_versions(found, named=named, latest=self.manifest.latest))

    def _reap(self, versions: Iterable[int]) -> None:
        """Delete in the background: the version that was just committed must not wait for it."""
        for version in list(versions):
            self._reaper.submit(self._delete_version, version)

    def _delete_version(self, version: int) -> None:
        run_id = self.manifest.run_id
        try:
            # The config first: a version without it is not loadable, so a crash between the two
            # deletes leaves nothing that looks whole.
            self._store.delete(file_key(run_id, version, name) for name in ADAPTER_FILES)
        except BucketError as error:
            logger.warning(
                "run %s: version %d stays until the next clean-up: %s", run_id, version, error
            )

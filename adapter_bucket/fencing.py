"""Who may write a run's manifest, and how a writer finds out that it may not any more.

With conditional writes the manifest itself is the lock: it is replaced by compare-and-swap, and a
takeover raises the epoch in it, so every write of the old writer fails. Without them, claims are
objects under unique keys: the highest (epoch, token) owns the run, and a writer lists them before
and after each write. What that still allows is in ``docs/protocol.md``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    FencedError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from adapter_bucket.layout import epoch_key, epochs_prefix, manifest_key, parse_epoch_key
from adapter_bucket.manifest import MAX_MANIFEST_BYTES, Manifest, decode, encode
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store, StoredObject

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Lost races of one commit, each against an earlier write of the same writer; one is usual."""


@dataclass(frozen=True)
class Found:
    """A manifest as it was read: the document, its bytes, and the ETag that belongs to them."""

    manifest: Manifest
    data: bytes
    etag: str


def read_manifest(store: Store, run_id: str, signing: SigningKeys) -> Found | None:
    """Read the manifest, or ``None`` if the run does not exist.

    Raises:
        IntegrityError: it is not a valid manifest.
    """
    try:
        found = store.get(manifest_key(run_id), max_bytes=MAX_MANIFEST_BYTES)
    except ObjectNotFound:
        return None
    if not isinstance(found, StoredObject):
        raise StoreUnavailable(f"{store.url} answered 'not modified' to an unconditional get")
    return Found(decode(found.data, run_id=run_id, signing=signing), found.data, found.etag)


class Ownership:
    """The manifest as its writer last wrote it.

    Thread-safe: versions and checkpoints are committed by two threads of one writer.
    """

    def __init__(self, store: Store, found: Found, *, signing: SigningKeys) -> None:
        self._store = store
        self._found = found
        self._signing = signing
        self._unsure = False
        self._lock = threading.Lock()
        self.manifest = found.manifest

    @property
    def _key(self) -> str:
        return manifest_key(self.manifest.run_id)

    def write(self, change: Callable[[Manifest], Manifest]) -> None:
        """Commit ``change(manifest)``, and keep it as the new manifest.

        Guarantees: when it returns, the change is in the bucket exactly once, whatever answers were
        lost. After ``StoreUnavailable`` it may or may not be; the next call finds out first.

        Args:
            change: Applied to the newest manifest of this writer; returns it unchanged if the
                change is in it already. Called again after a lost answer.

        Raises:
            FencedError: another writer owns the run. Nothing was written.
            StoreUnavailable: the store failed; call again.
        """
        with self._lock:
            self._write(change)

    def confirm(self) -> None:
        """Read the manifest and check that it is still this writer's.

        Raises:
            FencedError: it is not.
        """
        with self._lock:
            self._adopt()
            self._check_claims()

    def _write(self, change: Callable[[Manifest], Manifest]) -> None:
        if self._unsure:
            self._adopt()
        for _ in range(_ATTEMPTS):
            wanted = change(self.manifest)
            if wanted is self.manifest:
                return
            self._check_claims()
            data = encode(wanted, signing=self._signing)
            try:
                etag = self._store.replace(self._key, data, etag=self._found.etag)
            except PreconditionFailed:
                self._adopt()
                continue
            except StoreUnavailable:
                self._unsure = True
                raise
            self._found = Found(wanted, data, etag)
            self.manifest = wanted
            self._check_claims()
            return
        raise StoreUnavailable(f"{self._key} in {self._store.url} keeps changing; try again")

    def _adopt(self) -> None:
        """Read what is there: an earlier write of ours whose answer was lost, or another writer."""
        run_id = self.manifest.run_id
        try:
            found = read_manifest(self._store, run_id, self._signing)
        except IntegrityError:
            raise self.fenced("its manifest was damaged") from None
        if found is None:
            raise self.fenced("its manifest was deleted")
        writer, mine = found.manifest.writer, self.manifest.writer
        if (writer.epoch, writer.token) != (mine.epoch, mine.token):
            if self._store.conditional_writes or writer.epoch > mine.epoch:
                raise self.fenced(f"writer {writer.id!r} (epoch {writer.epoch}) owns it now")
            # Without conditional writes an older writer may have written late. The claims say
            # that the run is ours: put our manifest back over it.
            logger.warning("run %s: an older writer wrote late; its manifest is replaced", run_id)
            found = Found(self.manifest, found.data, found.etag)
        self._found, self.manifest, self._unsure = found, found.manifest, False

    def _check_claims(self) -> None:
        if self._store.conditional_writes:
            return
        mine = (self.manifest.writer.epoch, self.manifest.writer.token or "")
        highest = highest_claim(self._store, self.manifest.run_id)
        if highest is not None and highest > mine:
            raise self.fenced(f"a writer with epoch {highest[0]} claimed it")

    def fenced(self, owner: str) -> FencedError:
        """The error that says who has the run now."""
        writer = self.manifest.writer
        return FencedError(
            f"run {self.manifest.run_id!r} in {self._store.url} was taken from this writer "
            f"({writer.id!r}, epoch {writer.epoch}): {owner}. Nothing was published. Stop this "
            "trainer, or give it a run id of its own"
        )


def highest_claim(store: Store, run_id: str) -> tuple[int, str] | None:
    """The claim that owns a run on a store without conditional writes, if there is any."""
    claims = (parse_epoch_key(key) for key in store.list(epochs_prefix(run_id)))
    return max((claim for claim in claims if claim is not None), default=None)


def next_epoch(store: Store, manifest: Manifest | None, run_id: str) -> int:
    """Epoch above every one that was used for the run."""
    epoch = manifest.writer.epoch if manifest else 0
    if not store.conditional_writes:
        highest = highest_claim(store, run_id)
        epoch = max(epoch, highest[0] if highest else 0)
    return epoch + 1


def claim_epoch(store: Store, run_id: str, *, epoch: int, token: str) -> None:
    """Claim an epoch on a store without conditional writes.

    Raises:
        FencedError: another writer claimed this epoch, or a higher one, in the same moment.
    """
    if len(token) != 32:
        raise ConfigError("a claim needs a token of 32 hexadecimal digits")
    store.overwrite(epoch_key(run_id, epoch, token), b"{}")
    highest = highest_claim(store, run_id)
    if highest is not None and highest > (epoch, token):
        raise FencedError(
            f"run {run_id!r} in {store.url} was claimed by another writer just now (epoch "
            f"{highest[0]}); choose another run id"
        )


def withdraw_claims(store: Store, run_id: str, *, token: str) -> None:
    """Remove the claims of a writer that did not get the run."""
    with suppress(BucketError):
        keys = [(key, parse_epoch_key(key)) for key in store.list(epochs_prefix(run_id))]
        store.delete([key for key, claim in keys if claim is not None and claim[1] == token])

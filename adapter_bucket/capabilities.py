"""What a store can really do, found out by trying it once.

Stores that call themselves S3-compatible ignore conditions, change bytes, or answer from a cache.
A writer probes before it claims a run, so that such a store is reported once, with the consequence,
instead of showing as two trainers that overwrite each other.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from botocore.exceptions import ClientError

from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    ObjectNotFound,
    PreconditionFailed,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.layout import probe_key
from adapter_bucket.s3_errors import can_retry
from adapter_bucket.s3_store import S3Store
from adapter_bucket.store import NotModified, Store, StoredObject

logger = logging.getLogger(__name__)

SKEW_WARN_S = 60.0
"""S3 refuses requests that are 15 minutes off; a minute is a clock nobody keeps."""


@dataclass(frozen=True)
class Capabilities:
    """Answers of one probe."""

    conditional_create: bool
    compare_and_swap: bool
    conditional_get: bool
    round_trip: bool
    list_after_write: bool
    delete: bool
    clock_skew_s: float | None
    """This machine's clock minus the store's; ``None`` if the store does not say."""

    @property
    def conditional_writes(self) -> bool:
        """Whether the manifest can be fenced by the store itself."""
        return self.conditional_create and self.compare_and_swap

    def consequences(self) -> list[str]:
        """One sentence per missing capability: what it means, and what to do."""
        found = []
        if not self.round_trip:
            found.append(
                "objects do not come back byte for byte: nothing works here. On s3:// set "
                "checksums=when_required; otherwise use another store"
            )
        if not self.conditional_writes:
            found.append(
                "writes ignore conditions: a second writer is detected by claims instead, one "
                "listing before and after each publish; make sure that only one trainer runs"
            )
        if not self.conditional_get:
            found.append(
                "reads ignore conditions: every poll transfers the manifest (a few KB) instead "
                "of a 304; poll less often if traffic is paid"
            )
        if not self.list_after_write:
            found.append(
                "a new object is not listed at once: new runs are discovered late, and claims "
                "without conditional writes are not reliable"
            )
        if not self.delete:
            found.append(
                "objects cannot be deleted: old versions stay; allow s3:DeleteObject, or set a "
                "lifecycle rule"
            )
        if self.clock_skew_s is not None and abs(self.clock_skew_s) > SKEW_WARN_S:
            found.append(
                f"this machine's clock differs from the store's by {self.clock_skew_s:.0f} s: "
                "signatures are refused from 900 s on; run a time service"
            )
        return found


def probe(store: Store) -> Capabilities:
    """Try everything the contract needs with one small object, and remove it.

    Raises:
        StoreDenied: objects may not be written or read.
        StoreUnavailable: the store does not answer.
    """
    key = probe_key(secrets.token_hex(16))
    data = secrets.token_bytes(256) + b"\r\n\0aws-chunked"
    etag = store.create(key, data)
    deleted = False
    try:
        read = store.get(key)
        round_trip = isinstance(read, StoredObject) and read.data == data
        if isinstance(read, StoredObject):
            etag = read.etag
        conditional_get = (
            store.answers_304(key, etag)
            if isinstance(store, S3Store)
            else isinstance(store.get(key, if_none_match=etag), NotModified)
        )
        conditional_create = _refused(lambda: store.create(key, data))
        listed = key in set(store.list(key))
        swapped = not _refused(lambda: store.replace(key, data + b"2", etag=etag))
        compare_and_swap = swapped and _refused(lambda: store.replace(key, data, etag=etag))
    finally:
        with suppress(StoreDenied):
            store.delete([key])
            deleted = _gone(store, key)
    return Capabilities(
        conditional_create=conditional_create and store.conditional_writes,
        compare_and_swap=compare_and_swap and store.conditional_writes,
        conditional_get=conditional_get,
        round_trip=round_trip,
        list_after_write=listed,
        delete=deleted,
        clock_skew_s=_skew(store),
    )


def prepare_writer(store: Store) -> None:
    """Probe an S3 store once per process and bucket, and tell it what was found.

    Raises:
        ConfigError: objects do not come back as they were written.
    """
    if not isinstance(store, S3Store) or store.settings.conditional_writes != "auto":
        return
    place = (store.endpoint, store.url)
    with _LOCK:
        found = _KNOWN.get(place)
        if found is None:
            found = _KNOWN[place] = probe(store)
            for text in found.consequences():
                logger.warning("%s: %s", store.url, text)
    if not found.round_trip:
        raise ConfigError(f"{store.url} at {store.endpoint}: {found.consequences()[0]}")
    store.assume_conditional_writes(found.conditional_writes)


_KNOWN: dict[tuple[str, str], Capabilities] = {}
_LOCK = threading.Lock()


def _refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except PreconditionFailed:
        return True
    except StoreDenied:
        raise
    except StoreUnavailable as error:
        if not isinstance(error.__cause__, ClientError) or can_retry(error.__cause__):
            raise  # an outage: it says nothing, and would count for as long as this process lives
        # 501 or 400: the store does not know the condition.
        logger.debug("conditional write: %s", error)
    return False


def _gone(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except ObjectNotFound:
        return True
    return False


def _skew(store: Store) -> float | None:
    try:
        before = time.time()
        there = store.now()
        # A Date header has whole seconds: half a second is its mean error.
        return (before + time.time()) / 2 - there - 0.5 * (there == int(there))
    except BucketError:
        return None

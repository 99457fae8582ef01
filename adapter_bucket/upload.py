"""Puts the files of one version into the bucket, create-only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from adapter_bucket.errors import IntegrityError, PreconditionFailed
from adapter_bucket.layout import ADAPTER_FILES, WEIGHTS_FILE, file_key
from adapter_bucket.manifest import FileEntry
from adapter_bucket.store import Payload, Store, StoredObject

IN_ORDER_BYTES = 64 * 1024**2
"""From this size on the config goes first, alone: joining the parts of a large upload is not
exclusive on every store, while a put of the small config is."""


def put_version(store: Store, run_id: str, version: int, files: Mapping[str, Payload]) -> None:
    """Write the files of a version; they are invisible until a manifest names them.

    Guarantees: never overwrites. Files that are there already with the same bytes are fine: they
    are ours, from an attempt whose answer was lost.

    Raises:
        IntegrityError: a file of this version exists with other bytes.
        StoreUnavailable: the store failed; call again.
    """

    def put(name: str) -> None:
        _put(store, file_key(run_id, version, name), files[name])

    if memoryview(files[WEIGHTS_FILE]).nbytes >= IN_ORDER_BYTES:
        for name in ADAPTER_FILES:
            put(name)
        return
    with ThreadPoolExecutor(len(files), thread_name_prefix="bucket-put") as pool:
        futures = [pool.submit(put, name) for name in files]
    for future in futures:
        future.result()


def describe(data: Payload) -> FileEntry:
    """Size and digest of a file, as the manifest promises them."""
    return FileEntry(size=memoryview(data).nbytes, sha256=hashlib.sha256(data).hexdigest())


def _put(store: Store, key: str, data: Payload) -> None:
    try:
        store.create(key, data)
    except PreconditionFailed:
        if not _has_bytes(store, key, data):
            raise IntegrityError(
                f"{key} exists in {store.url} with other bytes: a crashed writer left it. Publish "
                "RunWriter.next_version instead"
            ) from None


def _has_bytes(store: Store, key: str, data: Payload) -> bool:
    try:
        stored = store.get(key, max_bytes=memoryview(data).nbytes)
    except IntegrityError:  # larger
        return False
    return isinstance(stored, StoredObject) and stored.data == data

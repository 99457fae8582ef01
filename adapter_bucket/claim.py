"""How a process becomes the writer of a run: create it, or raise the epoch in its manifest."""

from __future__ import annotations

import secrets
from contextlib import suppress

from adapter_bucket.base_model import BaseModelRef, mismatch
from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    FencedError,
    PreconditionFailed,
    StoreUnavailable,
)
from adapter_bucket.fencing import (
    Found,
    Ownership,
    claim_epoch,
    next_epoch,
    read_manifest,
    withdraw_claims,
)
from adapter_bucket.layout import adapters_prefix, manifest_key, parse_version_key
from adapter_bucket.manifest import FORMAT_VERSION, Manifest, RunState, Writer, encode
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store

_ATTEMPTS = 8
"""A takeover races with the commits of a writer that is still alive; each lost race reads again."""


def claim_run(
    store: Store,
    run_id: str,
    *,
    base_model: BaseModelRef,
    window: int,
    writer_id: str,
    takeover: bool,
    signing: SigningKeys,
) -> Ownership:
    """See ``publish.RunWriter.claim``."""
    if store.url.startswith("s3://"):
        from adapter_bucket.capabilities import prepare_writer

        prepare_writer(store)
    token = secrets.token_hex(16)
    try:
        return _claim(
            store,
            run_id,
            mine=Writer(id=writer_id, epoch=1, token=token),
            base_model=base_model,
            window=window,
            takeover=takeover,
            signing=signing,
        )
    except BucketError:
        if not store.conditional_writes:
            withdraw_claims(store, run_id, token=token)  # it would fence the writer that won
        raise


def versions_with_objects(store: Store, owner: Ownership) -> set[int]:
    """Versions of a run that was just claimed of which the bucket holds anything.

    Raises:
        StoreUnavailable: the listing failed. The run is marked interrupted, if possible: still
            marked running, it would be refused to the same trainer when it tries again.
    """
    run_id = owner.manifest.run_id
    try:
        keys = [parse_version_key(key) for key in store.list(adapters_prefix(run_id))]
    except BucketError:
        with suppress(BucketError):
            owner.write(
                lambda manifest: manifest.model_copy(update={"state": RunState.INTERRUPTED})
            )
        raise
    return {version for run, version in filter(None, keys) if run == run_id}


def _claim(
    store: Store,
    run_id: str,
    *,
    mine: Writer,
    base_model: BaseModelRef,
    window: int,
    takeover: bool,
    signing: SigningKeys,
) -> Ownership:
    token = mine.token or ""
    seen_epoch: int | None = None
    for _ in range(_ATTEMPTS):
        found = read_manifest(store, run_id, signing)
        if found is not None:
            writer = found.manifest.writer
            if writer.token == token:
                return Ownership(store, found, signing=signing)  # the answer was lost
            if seen_epoch is not None and writer.epoch > seen_epoch:
                raise _lost_race(store, found)
            _check_may_take(store, found.manifest, base_model, takeover=takeover)
            seen_epoch = writer.epoch
        epoch = next_epoch(store, found.manifest if found else None, run_id)
        if not store.conditional_writes:
            claim_epoch(store, run_id, epoch=epoch, token=token)
        mine = mine.model_copy(update={"epoch": epoch})
        wanted = (
            _first(run_id, base_model, mine, window)
            if found is None
            else found.manifest.model_copy(
                update={"writer": mine, "state": RunState.RUNNING, "window": window}
            )
        )
        try:
            return _write(store, found, wanted, signing)
        except PreconditionFailed:
            if found is None:
                seen_epoch = 0  # whoever created it in the same moment won
    raise StoreUnavailable(f"run {run_id!r} in {store.url} keeps changing; claim it again")


def _write(store: Store, found: Found | None, wanted: Manifest, signing: SigningKeys) -> Ownership:
    data, key = encode(wanted, signing=signing), manifest_key(wanted.run_id)
    etag = store.create(key, data) if found is None else store.replace(key, data, etag=found.etag)
    return Ownership(store, Found(wanted, data, etag), signing=signing)


def _first(run_id: str, base_model: BaseModelRef, writer: Writer, window: int) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        run_id=run_id,
        base_model=base_model,
        writer=writer,
        state=RunState.RUNNING,
        window=window,
        latest=0,
        versions=[],
    )


def _lost_race(store: Store, found: Found) -> FencedError:
    writer = found.manifest.writer
    return FencedError(
        f"run {found.manifest.run_id!r} in {store.url} was claimed by writer {writer.id!r} (epoch "
        f"{writer.epoch}) in the same moment; choose another run id"
    )


def _check_may_take(
    store: Store, manifest: Manifest, base_model: BaseModelRef, *, takeover: bool
) -> None:
    if manifest.state is RunState.DELETED:
        raise ConfigError(
            f"run {manifest.run_id!r} in {store.url} was deleted, and replicas may still know its "
            "version names; choose another run id"
        )
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

"""What happens to a run besides publishing: clean-up, an end from outside, deletion.

Everything here may run at any time, beside live writers and readers: a deletion only ever takes
objects that no manifest names and none can name any more (``retention.dead_versions``).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from adapter_bucket.checkpoint import dead_checkpoints
from adapter_bucket.errors import ConfigError, NotPublished, PreconditionFailed, StoreUnavailable
from adapter_bucket.fencing import Found, claim_epoch, next_epoch, read_manifest
from adapter_bucket.layout import (
    check_run_id,
    manifest_key,
    parse_checkpoint_key,
    parse_epoch_key,
    parse_heartbeat_key,
    parse_version_key,
    run_prefix,
)
from adapter_bucket.manifest import Manifest, RunState, Writer, encode
from adapter_bucket.retention import dead_versions
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import ObjectInfo, Store

DEFAULT_AGE_S = 3600.0
"""Nothing younger is collected: a margin for stores that list late, not needed for safety."""

_ATTEMPTS = 8


@dataclass
class Garbage:
    """What a clean-up found and, unless it was a dry run, removed."""

    keys: list[str] = field(default_factory=list)
    size_bytes: int = 0
    leftovers: int = 0
    """Temporary files and uploads in parts that were never finished."""


def collect(
    store: Store,
    run_id: str,
    *,
    older_than_s: float = DEFAULT_AGE_S,
    dry_run: bool = False,
    signing: SigningKeys | None = None,
) -> Garbage:
    """Remove dead versions and checkpoints, gone replicas' heartbeats, old claims and leftovers.

    Guarantees: never removes what the manifest names, nor what a live writer is about to commit.

    Args:
        store: Where the run lives.
        run_id: The run.
        older_than_s: Age by the store's clock that an object must have.
        dry_run: Only say what would go.
        signing: See ``fetch.RunReader``.

    Raises:
        NotPublished: the run has no manifest; ``delete_run`` removes what is left of it.
    """
    found = _read(store, run_id, signing)
    # Listed after the manifest was read: what is not listed is not touched, and a version that was
    # committed in between is above the ``latest`` read here.
    before = store.now() - older_than_s
    infos = [info for info in store.scan(run_prefix(run_id)) if info.modified_at < before]
    dead = _dead(infos, found.manifest)
    garbage = Garbage(sorted(info.key for info in dead), sum(info.size for info in dead))
    if not dry_run:
        store.delete(garbage.keys)
        garbage.leftovers = store.sweep(run_prefix(run_id), older_than_s=older_than_s)
    return garbage


def finish_run(store: Store, run_id: str, *, by: str, signing: SigningKeys | None = None) -> None:
    """Mark a run finished on behalf of a trainer that is gone. A trainer that is not is fenced.

    Raises:
        NotPublished: no such run.
        ConfigError: the run was deleted.
    """
    _end(store, run_id, RunState.FINISHED, by=by, signing=signing)


def delete_run(
    store: Store, run_id: str, *, by: str, purge: bool = False, signing: SigningKeys | None = None
) -> int:
    """Delete a run's objects; its manifest stays as a tombstone unless ``purge``.

    The tombstone keeps the run id from being used again: replicas and proxies that served the run
    know its version names, and a name must never mean other weights. Purge only once none of them
    is left running.

    Guarantees: the writer is fenced and readers see the end before the first object goes. May be
    repeated after a failure.

    Returns:
        How many objects were deleted.

    Raises:
        NotPublished: nothing of the run exists.
    """
    prefix = run_prefix(run_id)
    try:
        _end(store, run_id, RunState.DELETED, by=by, signing=signing)
    except NotPublished:
        if not any(True for _ in store.list(prefix)):
            raise
    keys = [key for key in store.list(prefix) if key != manifest_key(run_id)]
    if not purge:
        keys = [key for key in keys if parse_epoch_key(key) is None]
    store.delete(keys)
    store.sweep(prefix, older_than_s=0.0)
    if purge:
        store.delete([manifest_key(run_id)])
    return len(keys) + purge


def _dead(infos: list[ObjectInfo], manifest: Manifest) -> list[ObjectInfo]:
    run_id = manifest.run_id
    versions = {info.key: parse_version_key(info.key) for info in infos}
    numbers = {version for run, version in filter(None, versions.values()) if run == run_id}
    named = {entry.version for entry in manifest.versions}
    dead = set(dead_versions(numbers, named=named, latest=manifest.latest))
    checkpoints = {info.key: parse_checkpoint_key(info.key) for info in infos}
    places = [found[1:] for found in checkpoints.values() if found and found[0] == run_id]
    dead_places = set(dead_checkpoints(places, manifest))
    gone = []
    for info in infos:
        version, checkpoint = versions[info.key], checkpoints[info.key]
        claim = parse_epoch_key(info.key)
        if (
            (version is not None and version[1] in dead)
            or (checkpoint is not None and checkpoint[1:] in dead_places)
            or (claim is not None and claim[0] < manifest.writer.epoch)
            or parse_heartbeat_key(info.key) is not None
        ):
            gone.append(info)
    return gone


def _read(store: Store, run_id: str, signing: SigningKeys | None) -> Found:
    keys = SigningKeys.from_env() if signing is None else signing
    found = read_manifest(store, check_run_id(run_id), keys)
    if found is None:
        raise NotPublished(f"run {run_id!r} has no manifest in {store.url}")
    return found


def _end(
    store: Store, run_id: str, state: RunState, *, by: str, signing: SigningKeys | None
) -> None:
    keys = SigningKeys.from_env() if signing is None else signing
    for _ in range(_ATTEMPTS):
        found = _read(store, run_id, signing)
        manifest = found.manifest
        if manifest.state is state or manifest.state is RunState.DELETED:
            if state is not RunState.DELETED and manifest.state is RunState.DELETED:
                raise ConfigError(f"run {run_id!r} in {store.url} was deleted")
            return
        # A new epoch: the old writer must not be able to set it running again.
        token = secrets.token_hex(16)
        epoch = next_epoch(store, manifest, run_id)
        if not store.conditional_writes:
            claim_epoch(store, run_id, epoch=epoch, token=token)
        update = {
            "state": state,
            "writer": Writer(id=by, epoch=epoch, token=token),
            "versions": [] if state is RunState.DELETED else manifest.versions,
            "checkpoints": [] if state is RunState.DELETED else manifest.checkpoints,
        }
        data = encode(manifest.model_copy(update=update), signing=keys)
        try:
            store.replace(manifest_key(run_id), data, etag=found.etag)
        except PreconditionFailed:
            continue  # the writer published in between, or our own answer was lost: look again
        return
    raise StoreUnavailable(f"run {run_id!r} in {store.url} keeps changing; try again")

"""``resume_from_checkpoint="bucket"``: from the words to a local checkpoint directory.

Owns which rank fetches, and what is refused. Rank 0 decides which checkpoint it is; the first rank
of every host fetches it; the others wait. An error on one rank is an error on all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_bucket.base_model import BaseModelRef, mismatch
from adapter_bucket.checkpoint import CheckpointIndex
from adapter_bucket.checkpoint_fetch import fetch_checkpoint, fetch_newest, read_index
from adapter_bucket.errors import ConfigError, IntegrityError, NotPublished, StoreUnavailable
from adapter_bucket.fencing import read_manifest
from adapter_bucket.layout import manifest_key
from adapter_bucket.manifest import CheckpointEntry, Manifest
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from trl_async_bucket.ranks import all_ranks, from_rank_0, is_rank_0, local_rank, world_size

logger = logging.getLogger(__name__)

RESUME = "bucket"
"""Continue from the newest checkpoint, or start at step 0 if the run has none."""

RESUME_REQUIRED = "bucket:required"
"""Continue from the newest checkpoint, or fail."""


@dataclass(frozen=True)
class ResumePoint:
    """Where to go on from."""

    entry: CheckpointEntry
    newest: tuple[int, int]
    """(epoch, step) of the newest checkpoint in the manifest when it was read."""
    path: Path


@dataclass(frozen=True)
class ResumeRequest:
    """What is to be resumed, by what."""

    run_id: str
    output_dir: Path
    required: bool
    sharding: str
    """``none``, ``fsdp`` or ``deepspeed``: how this trainer reads checkpoints."""


def asked_for(argument: Any, configured: Any) -> str | None:
    """Which of the two words was given to ``train()`` or, failing that, in the config."""
    given = configured if argument is None else argument
    return given if given in (RESUME, RESUME_REQUIRED) else None


def resume_point(
    request: ResumeRequest,
    *,
    open_bucket: Callable[[], Store],
    base_model: Callable[[], BaseModelRef],
) -> ResumePoint | None:
    """Bring the newest checkpoint to every host. All ranks must call it.

    Returns:
        Where it is, or ``None``: the run has no checkpoint, and none is required.

    Raises:
        ConfigError: the checkpoint is of another base model, or of ranks that shard differently.
        NotPublished: there is none, and one is required.
        IntegrityError, StoreDenied, StoreUnavailable: see ``checkpoint_fetch.fetch_newest``.
        RankFailed: one of these, on another rank.
    """
    first = None
    with all_ranks("looking for a checkpoint to resume from"):
        if is_rank_0():
            first = _find(request, open_bucket(), base_model())
    first = from_rank_0(first)
    if first is None:
        return None
    with all_ranks("fetching the checkpoint to resume from"):
        if local_rank() == 0 and not is_rank_0():
            fetch_checkpoint(open_bucket(), request.run_id, first.entry, request.output_dir)
    return first


def check_still_newest(manifest: Manifest, point: ResumePoint) -> None:
    """After the claim: nobody may have gone further while the checkpoint was fetched.

    Raises:
        StoreUnavailable: somebody has. It is fenced now, so starting again is enough.
    """
    last = manifest.checkpoints[-1] if manifest.checkpoints else None
    if last is None or (last.epoch, last.step) != point.newest:
        raise StoreUnavailable(
            f"run {manifest.run_id!r} was still being trained: while checkpoint "
            f"{point.entry.step} was fetched, {_named(last)} became its newest. The other trainer "
            "is fenced now; start this one again"
        )


def check_trainer(index: CheckpointIndex, *, world_size: int, sharding: str) -> None:
    """Refuse a checkpoint that these ranks cannot read; warn where the result is not the same.

    Raises:
        ConfigError: ranks wrote it in parts, and the parts do not fit.
    """
    wrote = index.trainer
    where = f"checkpoint {index.step} of run {index.run_id!r}"
    if "deepspeed" in (wrote.sharding, sharding) and (
        (wrote.sharding, wrote.world_size) != (sharding, world_size)
    ):
        raise ConfigError(
            f"{where} was written by {wrote.world_size} ranks with sharding {wrote.sharding!r}; "
            f"this trainer has {world_size} with {sharding!r}, and DeepSpeed reads its own parts "
            "only. Start the same number of ranks with the same configuration"
        )
    if wrote.sharding != sharding:
        raise ConfigError(
            f"{where} was written with sharding {wrote.sharding!r}, this trainer has "
            f"{sharding!r}: start it the way the run was started"
        )
    if wrote.world_size != world_size:
        logger.warning(
            "%s was written by %d ranks, this trainer has %d: it goes on, but with other batches "
            "and random numbers than the run would have seen",
            where,
            wrote.world_size,
            world_size,
        )


def _find(request: ResumeRequest, store: Store, base_model: BaseModelRef) -> ResumePoint | None:
    found = read_manifest(store, request.run_id, SigningKeys.from_env())
    manifest = found.manifest if found else None
    if manifest is None or not manifest.checkpoints:
        _say_none(request, store, manifest)
        return None
    if difference := mismatch(manifest.base_model, base_model):
        raise ConfigError(
            f"run {request.run_id!r} in {store.url} cannot be resumed: "
            f"{difference.replace('this server serves', 'this trainer has')}. Load that model, or "
            "choose another bucket_run_id"
        )
    newest = manifest.checkpoints[-1]
    # Before gigabytes travel. One that is damaged or gone is passed over by the fetch.
    with suppress(IntegrityError, NotPublished):
        _check_entry(request, store, newest)
    fetched = fetch_newest(store, request.run_id, request.output_dir)
    if fetched is None:
        _say_none(request, store, manifest)
        return None
    entry, path = fetched
    if entry != newest:
        _check_entry(request, store, entry)
    logger.warning(
        "run %s goes on from checkpoint %d (%d bytes, in %s); versions go on from %d",
        request.run_id,
        entry.step,
        entry.size,
        path,
        manifest.latest + 1,
    )
    return ResumePoint(entry, (newest.epoch, newest.step), path)


def _check_entry(request: ResumeRequest, store: Store, entry: CheckpointEntry) -> None:
    index = read_index(store, request.run_id, entry)
    check_trainer(index, world_size=world_size(), sharding=request.sharding)


def _say_none(request: ResumeRequest, store: Store, manifest: Manifest | None) -> None:
    looked = (
        f"there is no {manifest_key(request.run_id)}"
        if manifest is None
        else f"its manifest names no checkpoint (latest version {manifest.latest})"
    )
    text = f"run {request.run_id!r} in {store.url} has no checkpoint to resume from: {looked}"
    if request.required:
        raise NotPublished(f"{text}. resume_from_checkpoint={RESUME!r} would start at step 0")
    logger.warning("%s. Training starts at step 0", text)


def _named(entry: CheckpointEntry | None) -> str:
    return "another manifest" if entry is None else f"checkpoint {entry.step}"

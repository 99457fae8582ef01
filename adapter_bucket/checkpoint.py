"""A trainer checkpoint in the bucket: the schema of its index, and which ones may go. Pure.

A checkpoint is the directory that a Hugging Face trainer wrote, file by file below a prefix of its
own, and an *index* that lists the files with size and sha256. It exists once the manifest names the
index, together with the index's digest: complete, or absent. The prose is in ``docs/protocol.md``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.layout import MAX_STEP, check_checkpoint_file
from adapter_bucket.manifest import CheckpointEntry, FileEntry, Manifest, RunId, brief
from adapter_bucket.wire import MAX_INT, READABLE

CHECKPOINT_FORMAT = 1
"""Major version of the index. A reader refuses any other."""

MAX_INDEX_BYTES = 4 * 1024**2
MAX_FILES = 16384
"""A sharded checkpoint has a few files per rank."""


class CheckpointFile(BaseModel):
    """Size and digest of one file."""

    model_config = READABLE

    size: int = Field(ge=0, le=MAX_INT)
    """Bytes; a trainer may write empty files."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TrainerFacts(BaseModel):
    """What wrote the checkpoint, as far as it decides who can continue from it."""

    model_config = READABLE

    world_size: int = Field(ge=1, le=2**20)
    """Ranks of the trainer."""
    sharding: str = Field(default="none", pattern=r"^[a-z0-9_]{1,32}$")
    """``none`` if every file is whole; ``fsdp`` or ``deepspeed`` if ranks wrote parts."""
    software: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Package to version. For people."""


class CheckpointIndex(BaseModel):
    """The index: every file of one checkpoint."""

    model_config = READABLE

    format_version: int
    run_id: RunId
    step: int = Field(ge=0, le=MAX_STEP)
    epoch: int = Field(ge=1, le=MAX_STEP)
    trainer: TrainerFacts
    files: dict[str, CheckpointFile] = Field(min_length=1, max_length=MAX_FILES)

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, CheckpointFile]) -> dict[str, CheckpointFile]:
        try:
            check_names(files)
        except ConfigError as error:  # pydantic collects ValueErrors only
            raise ValueError(str(error)) from None
        return files

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        if self.format_version != CHECKPOINT_FORMAT:
            raise ValueError(
                f"format_version {self.format_version} is not {CHECKPOINT_FORMAT}; upgrade the "
                "older side"
            )
        return self

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def check_names(names: Iterable[str]) -> None:
    """Check that files of these names can lie in one directory of any file system.

    Raises:
        ConfigError: a name is not plain (``layout.check_checkpoint_file``), two differ in case
            only, or one is the directory of another.
    """
    seen: set[str] = set()
    folders: set[str] = set()
    for name in names:
        check_checkpoint_file(name)
        folded = name.lower()
        parents = folded.split("/")[:-1]
        folders.update("/".join(parents[: depth + 1]) for depth in range(len(parents)))
        if folded in seen:
            raise ConfigError(f"checkpoint file {name!r} occurs twice but for upper and lower case")
        seen.add(folded)
    if both := sorted(seen & folders):
        raise ConfigError(f"checkpoint file {both[0]!r} is the directory of another one")


def encode_index(index: CheckpointIndex) -> bytes:
    """Serialise to the bytes that go into the bucket.

    Raises:
        ConfigError: the document is too large.
    """
    data = json.dumps(index.model_dump(mode="json"), indent=1, sort_keys=True).encode()
    if len(data) > MAX_INDEX_BYTES:
        raise ConfigError(
            f"the index of checkpoint {index.step} would have {len(data)} bytes, the limit is "
            f"{MAX_INDEX_BYTES}: it has {len(index.files)} files"
        )
    return data


def decode_index(data: bytes, *, run_id: str, entry: CheckpointEntry) -> CheckpointIndex:
    """Parse and check an index read from the bucket.

    Args:
        data: The object's bytes.
        run_id: The run whose key was read.
        entry: The checkpoint's entry in the manifest, whose digest the bytes must have.

    Raises:
        IntegrityError: they have not, or are no index of that checkpoint, or name a file that must
            not be written.
    """
    where = f"index of checkpoint {entry.step} (epoch {entry.epoch}) of run {run_id!r}"
    if len(data) != entry.index.size or hashlib.sha256(data).hexdigest() != entry.index.sha256:
        raise IntegrityError(f"{where} is not the one that the manifest names")
    try:
        index = CheckpointIndex.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{where} is not valid: {brief(error)}") from None
    if (index.run_id, index.step, index.epoch) != (run_id, entry.step, entry.epoch):
        raise IntegrityError(f"{where} says it belongs to another checkpoint")
    if index.size != entry.size:
        raise IntegrityError(f"{where} has {index.size} bytes, the manifest says {entry.size}")
    return index


def entry_of(index: CheckpointIndex, data: bytes, *, created_at: float) -> CheckpointEntry:
    """The manifest's entry of a checkpoint whose index has the bytes ``data``."""
    return CheckpointEntry(
        step=index.step,
        epoch=index.epoch,
        created_at=created_at,
        size=index.size,
        index=FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest()),
    )


def with_checkpoint(
    manifest: Manifest, entry: CheckpointEntry, *, limit: int
) -> tuple[Manifest, list[CheckpointEntry]]:
    """The manifest with one checkpoint more, and the entries that fell out of it.

    Args:
        manifest: The newest manifest of the writer.
        entry: A checkpoint whose files and index are in the bucket.
        limit: How many checkpoints stay, at least 1.

    Returns:
        The same manifest object if the entry is in it already.

    Raises:
        ConfigError: the entry is not newer than the newest one. Within an epoch steps ascend, so
            that what is below the newest and unnamed is garbage for ever.
    """
    known = manifest.checkpoints
    if entry in known:
        return manifest, []
    if known and (entry.epoch, entry.step) <= (known[-1].epoch, known[-1].step):
        raise ConfigError(
            f"checkpoint {entry.step} of run {manifest.run_id!r} is not newer than the committed "
            f"checkpoint {known[-1].step} of the same trainer"
        )
    together = [*known, entry]
    kept = together[-limit:]
    return manifest.model_copy(update={"checkpoints": kept}), together[: len(together) - len(kept)]


def dead_checkpoints(found: Iterable[tuple[int, int]], manifest: Manifest) -> list[tuple[int, int]]:
    """Which (step, epoch) with objects in the bucket no reader can ever need, ascending.

    Those that the manifest does not name and that can never be committed any more: an older epoch
    is fenced, and within an epoch steps only go up. Both stay true, so the decision is right also
    for a process that was paused before it deletes. The one that the owner is uploading stays.
    """
    named = {(entry.step, entry.epoch) for entry in manifest.checkpoints}
    epoch = manifest.writer.epoch
    newest = max((entry.step for entry in manifest.checkpoints if entry.epoch == epoch), default=-1)
    return sorted(
        (step, at)
        for step, at in set(found)
        if (step, at) not in named and (at < epoch or (at == epoch and step <= newest))
    )

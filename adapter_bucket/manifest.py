"""The manifest: its schema and its strict codec. Pure.

The manifest is the one mutable object of a run and the commit point of a publish. This module owns
its field names, its limits and what makes a document valid; it does no I/O. The prose is in
``docs/protocol.md``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.layout import ADAPTER_FILES, MAX_STEP, MAX_VERSION, WEIGHTS_FILE, check_run_id
from adapter_bucket.probe import Probe
from adapter_bucket.signing import BLANK, SigningKeys
from adapter_bucket.wire import MAX_INT, READABLE

NO_KEYS = SigningKeys()

FORMAT_VERSION = 1
"""Major version of the bucket format. A reader refuses any other."""

MAX_MANIFEST_BYTES = 1024 * 1024
"""A manifest is a few KB, about 1 KB per kept version. A larger object than this is not parsed: the
worst document of this size costs a reader about 1 s of CPU and 350 MB at its peak."""

MAX_FILE_BYTES = 64 * 1024**3
"""Upper limit of one adapter file: more is a mistake, not an adapter."""


def _valid_run_id(value: str) -> str:
    try:
        return check_run_id(value)
    except ConfigError as error:  # pydantic collects ValueErrors only
        raise ValueError(str(error)) from None


RunId = Annotated[str, AfterValidator(_valid_run_id)]
Version = Annotated[int, Field(ge=1, le=MAX_VERSION)]


class RunState(StrEnum):
    """What the writer last said about the run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DELETED = "deleted"
    """Its objects are gone for good; the manifest stays so that no name is ever used again."""


class FileEntry(BaseModel):
    """Size and digest of one file, checked by every reader before the file is used."""

    model_config = READABLE

    size: int = Field(ge=1, le=MAX_FILE_BYTES)
    """Bytes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Writer(BaseModel):
    """The one process that may publish. The epoch is the fencing token."""

    model_config = READABLE

    id: str = Field(min_length=1, max_length=256)
    """Free text for people: host, pid and a random part."""
    epoch: int = Field(ge=1, le=MAX_INT)
    """Raised by one at every takeover; a writer whose epoch is not in the manifest is fenced."""
    token: str | None = Field(default=None, max_length=64)
    """Random, new at every claim: a writer knows by it a write of its own whose answer was lost."""


class Signature(BaseModel):
    """HMAC-SHA256 over the document; see ``signing``."""

    model_config = READABLE

    key_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    hmac_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class VersionEntry(BaseModel):
    """One committed policy version."""

    model_config = READABLE

    version: Version
    step: int = Field(ge=0, le=MAX_INT)
    """Optimizer step after which the snapshot was taken; 0 is the untrained adapter."""
    created_at: float = Field(ge=0, le=1e11)
    """Unix time of the commit by the writer's clock, seconds. For people; never compared."""
    files: dict[str, FileEntry]
    rank: int = Field(ge=1, le=65536)
    """Largest rank of any module; what a replica's ``--max-lora-rank`` must reach."""
    dtype: str = Field(min_length=1, max_length=32)
    """dtype of the tensors in the file, as torch names it without prefix: ``bfloat16``."""
    adapter_config: dict[str, Any]
    """The content of ``adapter_config.json``, so that a reader needs one GET for the weights."""
    kind: str = "lora"
    """Leaves room for other kinds of version. A reader skips an entry whose kind it lacks."""
    probe: Probe | None = None
    """What a replica's engine must compute before the version is ready there."""

    @model_validator(mode="after")
    def _lora_has_its_files(self) -> Self:
        if self.kind == "lora" and set(self.files) != set(ADAPTER_FILES):
            raise ValueError(f"files must be exactly {', '.join(ADAPTER_FILES)}")
        return self

    @property
    def weights(self) -> FileEntry:
        """Entry of the safetensors file."""
        return self.files[WEIGHTS_FILE]


class CheckpointEntry(BaseModel):
    """One committed trainer checkpoint; its files are listed in its index (``checkpoint``)."""

    model_config = READABLE

    step: int = Field(ge=0, le=MAX_STEP)
    """Optimizer steps it continues from."""
    epoch: int = Field(ge=1, le=MAX_STEP)
    """Epoch of the writer that made it: part of its keys."""
    created_at: float = Field(ge=0, le=1e11)
    """Unix time of the commit by the writer's clock, seconds. For people; never compared."""
    size: int = Field(ge=0, le=MAX_INT)
    """Bytes of all its files."""
    index: FileEntry
    """The document that lists the files; vouches for all of them."""


class Manifest(BaseModel):
    """All that a reader needs to know of a run. Immutable; ``model_copy`` makes the next one."""

    model_config = READABLE

    format_version: int
    run_id: RunId
    base_model: BaseModelRef
    writer: Writer
    state: RunState = Field(strict=False)
    window: int = Field(ge=1, le=4096)
    """How many of the newest versions replicas keep ready: the trainer's max_staleness + 2."""
    latest: int = Field(ge=0, le=MAX_VERSION)
    """Newest committed version; 0 while nothing is published. Never goes down."""
    versions: list[VersionEntry] = Field(max_length=16384)
    """Every version whose objects exist, ascending."""
    checkpoints: list[CheckpointEntry] = Field(default_factory=list, max_length=4096)
    """Every complete checkpoint, ascending in (epoch, step): the last one is the newest. Absent
    while there is none."""
    signature: Signature | None = None
    """Present if the writer has a signing key. The last field, so that its digits come last."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        numbers = [entry.version for entry in self.versions]
        if any(newer <= older for older, newer in pairwise(numbers)):
            raise ValueError("versions must be strictly ascending")
        if numbers and numbers[-1] != self.latest:
            raise ValueError(f"latest is {self.latest} but the last version is {numbers[-1]}")
        places = [(entry.epoch, entry.step) for entry in self.checkpoints]
        if any(newer <= older for older, newer in pairwise(places)):
            raise ValueError("checkpoints must be strictly ascending in (epoch, step)")
        return self

    def window_versions(self) -> list[VersionEntry]:
        """Entries that replicas keep ready, newest last."""
        return self.versions[-self.window :]

    def entry(self, version: int) -> VersionEntry | None:
        """Entry of ``version``, or ``None`` if the manifest does not hold it."""
        return next((entry for entry in self.versions if entry.version == version), None)


def encode(manifest: Manifest, *, signing: SigningKeys = NO_KEYS) -> bytes:
    """Serialise to the bytes that go into the bucket (UTF-8 JSON), signed if there is a key.

    Raises:
        ConfigError: the document is too large, or holds text that is no valid Unicode.
    """
    document = manifest.model_dump(mode="json")
    del document["signature"]
    if not manifest.checkpoints:
        del document["checkpoints"]
    if signing:  # behind all else, also behind unknown fields of a newer writer
        document["signature"] = {"key_id": signing.signing_id, "hmac_sha256": BLANK}
    try:
        data = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"manifest of run {manifest.run_id!r}: {str(error)[:200]}") from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"manifest of run {manifest.run_id!r} would have {len(data)} bytes, the limit is "
            f"{MAX_MANIFEST_BYTES}: keep fewer versions (window, keep_every, milestones)"
        )
    return signing.sign(data) if signing else data


def decode(data: bytes, *, run_id: str, signing: SigningKeys = NO_KEYS) -> Manifest:
    """Parse and check a manifest read from the bucket.

    Args:
        data: The object's bytes.
        run_id: The run whose key was read; a manifest of another run is refused.
        signing: With keys, an unsigned or wrongly signed manifest is refused.

    Raises:
        IntegrityError: the bytes are too large, not JSON, of an unknown major version, of another
            run, wrongly signed, or break a rule of the schema. The message says which.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(
            f"manifest of run {run_id!r} has {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    _check_format_version(data, run_id)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"manifest of run {run_id!r} is not valid: {brief(error)}") from None
    if manifest.run_id != run_id:
        raise IntegrityError(f"manifest of run {run_id!r} says it belongs to {manifest.run_id!r}")
    if signing:
        signature = manifest.signature
        signing.verify(
            data,
            key_id=signature.key_id if signature else None,
            digits=signature.hmac_sha256 if signature else None,
        )
    return manifest


class _Head(BaseModel):
    format_version: int


def _check_format_version(data: bytes, run_id: str) -> None:
    # Before the schema: of another major version nothing else may be assumed.
    try:
        found = _Head.model_validate_json(data).format_version
    except ValidationError as error:
        raise IntegrityError(f"manifest of run {run_id!r} is not valid: {brief(error)}") from None
    if found != FORMAT_VERSION:
        raise IntegrityError(
            f"manifest of run {run_id!r} has format_version {str(found)[:20]}; this version of "
            f"trl-async-bucket reads {FORMAT_VERSION}. Upgrade the older side"
        )


def brief(error: ValidationError, limit: int = 3) -> str:
    """First faults of a validation error, without echoing the (possibly huge) input."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    shown = "; ".join(
        f"{'.'.join(map(str, fault['loc']))[:80] or 'document'}: {fault['msg'][:120]}"
        for fault in faults[:limit]
    )
    return shown + (f" (+{len(faults) - limit} more)" if len(faults) > limit else "")

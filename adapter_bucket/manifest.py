"""The manifest: its schema and its strict codec. Pure.

The manifest is the one mutable object of a run and the commit point of a publish. This module owns
its field names, its limits and what makes a document valid; it does no I/O. The prose is in
``docs/protocol.md``.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.layout import ADAPTER_FILES, MAX_VERSION, WEIGHTS_FILE, check_run_id

FORMAT_VERSION = 1
"""Major version of the bucket format. A reader refuses any other."""

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""A manifest is a few KB; a larger object than this is not one and is not parsed."""

MAX_FILE_BYTES = 64 * 1024**3
"""Upper limit of one adapter file: more is a mistake, not an adapter."""

_READABLE = ConfigDict(frozen=True, extra="allow", strict=True)
"""Unknown fields are kept and ignored, so that a newer minor writer can add optional ones."""


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


class FileEntry(BaseModel):
    """Size and digest of one file, checked by every reader before the file is used."""

    model_config = _READABLE

    size: int = Field(ge=1, le=MAX_FILE_BYTES)
    """Bytes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Writer(BaseModel):
    """The one process that may publish. The epoch is the fencing token."""

    model_config = _READABLE

    id: str = Field(min_length=1, max_length=256)
    """Free text for people: host, pid and a random part."""
    epoch: int = Field(ge=1, le=2**53)
    """Raised by one at every takeover; a writer whose epoch is not in the manifest is fenced."""


class VersionEntry(BaseModel):
    """One committed policy version."""

    model_config = _READABLE

    version: Version
    step: int = Field(ge=0, le=2**53)
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
    probe: dict[str, Any] | None = None
    """Reserved: a token sequence with the trainer's logprobs, checked before a version is ready."""

    @model_validator(mode="after")
    def _lora_has_its_files(self) -> Self:
        if self.kind == "lora" and set(self.files) != set(ADAPTER_FILES):
            raise ValueError(f"files must be exactly {', '.join(ADAPTER_FILES)}")
        return self

    @property
    def weights(self) -> FileEntry:
        """Entry of the safetensors file."""
        return self.files[WEIGHTS_FILE]


class Manifest(BaseModel):
    """All that a reader needs to know of a run. Immutable; ``model_copy`` makes the next one."""

    model_config = _READABLE

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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        numbers = [entry.version for entry in self.versions]
        if any(newer <= older for older, newer in pairwise(numbers)):
            raise ValueError("versions must be strictly ascending")
        if numbers and numbers[-1] != self.latest:
            raise ValueError(f"latest is {self.latest} but the last version is {numbers[-1]}")
        return self

    def window_versions(self) -> list[VersionEntry]:
        """Entries that replicas keep ready, newest last."""
        return self.versions[-self.window :]

    def entry(self, version: int) -> VersionEntry | None:
        """Entry of ``version``, or ``None`` if the manifest does not hold it."""
        return next((entry for entry in self.versions if entry.version == version), None)


def encode(manifest: Manifest) -> bytes:
    """Serialise to the bytes that go into the bucket (UTF-8 JSON)."""
    return manifest.model_dump_json(indent=1).encode()


def decode(data: bytes, *, run_id: str) -> Manifest:
    """Parse and check a manifest read from the bucket.

    Args:
        data: The object's bytes.
        run_id: The run whose key was read; a manifest of another run is refused.

    Raises:
        IntegrityError: the bytes are too large, not JSON, of an unknown major version, of another
            run, or break a rule of the schema. The message says which.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(
            f"manifest of run {run_id!r} has {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"manifest of run {run_id!r} is not valid: {_brief(error)}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise IntegrityError(
            f"manifest of run {run_id!r} has format_version {manifest.format_version}; this "
            f"version of trl-async-bucket reads {FORMAT_VERSION}. Upgrade the older side."
        )
    if manifest.run_id != run_id:
        raise IntegrityError(f"manifest of run {run_id!r} says it belongs to {manifest.run_id!r}")
    return manifest


def _brief(error: ValidationError, limit: int = 3) -> str:
    """First faults of a validation error, without echoing the (possibly huge) input."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    shown = "; ".join(
        f"{'.'.join(map(str, fault['loc']))[:80] or 'document'}: {fault['msg'][:120]}"
        for fault in faults[:limit]
    )
    return shown + (f" (+{len(faults) - limit} more)" if len(faults) > limit else "")

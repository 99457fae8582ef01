"""Which base model an adapter belongs to, and whether a replica serves that one. Pure.

A name alone does not decide: the trainer may read ``/models/qwen`` while the replica serves
``Qwen/Qwen2.5-1.5B``. So a reference carries the name as configured and a fingerprint of the
architecture; both must agree, the name up to its last path component.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# Integer fields of a Hugging Face config that decide tensor shapes. Only these are compared:
# vLLM rewrites others (rope parameters, architectures) while loading.
_SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)

_COMMIT = re.compile(r"[0-9a-f]{40}")


class BaseModelRef(BaseModel):
    """The base model that the adapters of a run are trained on."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = Field(min_length=1, max_length=1024)
    """Hub id or directory, as the trainer names it. Compared by its last path component."""
    revision: str | None = Field(default=None, max_length=256)
    """Hub revision: a commit, where it is known, or a name. Compared when both sides know one, and
    both a commit or both a name: trainers know the commit, servers what ``--revision`` said."""
    architecture: str | None = Field(default=None, max_length=64)
    """``architecture_fingerprint`` of the model's config; compared when both sides know one."""


def architecture_fingerprint(config: Mapping[str, Any]) -> str:
    """Fingerprint of the tensor shapes that a Hugging Face ``config.json`` implies.

    Args:
        config: ``PretrainedConfig.to_dict()``; of a multimodal model, its ``text_config`` counts.

    Returns:
        16 hexadecimal digits.
    """
    text = config.get("text_config")
    source = text if isinstance(text, Mapping) and "hidden_size" in text else config
    shapes = {name: source.get(name) for name in _SHAPE_FIELDS}
    shapes["model_type"] = source.get("model_type")
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16]


def _last_component(model_id: str) -> str:
    return model_id.rstrip("/").rsplit("/", 1)[-1].lower()


def _other_revision(trained: str | None, served: str | None) -> bool:
    """Whether two revisions differ for certain: a commit and a branch may be the same thing."""
    if trained is None or served is None or trained == served:
        return False
    return bool(_COMMIT.fullmatch(trained)) == bool(_COMMIT.fullmatch(served))


def mismatch(trained: BaseModelRef, served: BaseModelRef) -> str | None:
    """Say how two references differ, or ``None`` if they name the same base model.

    Returns:
        A phrase for an error message that names both values.
    """
    if _last_component(trained.id) != _last_component(served.id):
        return f"the run is trained on base model {trained.id!r}, this server serves {served.id!r}"
    if _other_revision(trained.revision, served.revision):
        return (
            f"the run is trained on revision {trained.revision!r} of {trained.id!r}, "
            f"this server serves revision {served.revision!r}"
        )
    if trained.architecture and served.architecture and trained.architecture != served.architecture:
        return (
            f"base models {trained.id!r} (trained) and {served.id!r} (served) share a name but "
            f"not their shapes (fingerprints {trained.architecture} and {served.architecture})"
        )
    return None

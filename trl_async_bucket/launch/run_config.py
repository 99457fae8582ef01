"""The YAML file that describes a run on Hugging Face Jobs. Strict: an unknown key is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_REPLICAS = 64
"""As many as a proxy takes in (its ``--max-replicas``)."""


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig:
    """The vLLM jobs."""

    count: int = 1
    flavor: str
    """Hardware of one job, for example ``a10g-large``."""
    image: str = "vllm/vllm-openai:v0.31.0"
    args: tuple[str, ...] = ()
    """Added to ``vllm serve``, for example ``--max-lora-rank 16``."""
    install: str = "trl-async-bucket[vllm]"
    """What pip installs before the start; empty for an image that has the plugin."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer's job."""

    flavor: str
    script: Path
    """A TRL script; may stand beside the YAML file."""
    args: tuple[str, ...] = ()
    image: str = "python:3.11-bookworm"
    """Has a C compiler, which Triton needs; torch brings its CUDA libraries by itself."""
    install: str = "trl-async-bucket[trl,proxy]"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    name: str
    """Run id in the bucket, and the beginning of the jobs' names."""
    bucket: str
    """``hf://buckets/owner/name[/prefix]`` or ``s3://…``."""
    model: str
    replicas: ReplicasConfig
    trainer: TrainerConfig
    mount_bucket: bool = False
    """Mount an ``hf://`` bucket into every job instead of using its S3 gateway: no keys are needed
    then, but a mount shows changes late."""
    namespace: str | None = None
    """Whose jobs they are: a user (default: the token's) or an organisation."""
    secrets: tuple[str, ...] = ()
    """Names of variables of this shell that every job gets, encrypted."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Plain variables for every job."""
    timeout: str = "6h"
    """The platform ends every job after this time, whatever becomes of this launcher."""
    ready_timeout_s: float = 1800.0
    """Longest wait for the replicas: image, model download, start."""
    min_replicas: int = 0
    """Healthy replicas with which the trainer starts; 0: all."""


def load(path: Path) -> RunConfig:
    """Read and check the file.

    Raises:
        ConfigError: names the key, its value and what to write instead.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot read it: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from None
    values = _section(document, RunConfig, "")
    values["replicas"] = ReplicasConfig(**_section(values["replicas"], ReplicasConfig, "replicas."))
    trainer = _section(values["trainer"], TrainerConfig, "trainer.")
    trainer["script"] = (path.parent / str(trainer["script"])).resolve()
    values["trainer"] = TrainerConfig(**trainer)
    config = RunConfig(**values)
    _check(config)
    return config


def _section(document: Any, kind: type[Any], prefix: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'the file'} must be a mapping of settings")
    known = {item.name: item for item in fields(kind)}
    if unknown := sorted(set(map(str, document)) - set(known)):
        raise ConfigError(f"{prefix}{unknown[0]} is unknown; use {', '.join(sorted(known))}")
    for name, item in known.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and name not in document:
            raise ConfigError(f"{prefix}{name} is missing")
    return {name: _value(value, known[name], prefix) for name, value in document.items()}


def _value(value: Any, item: Any, prefix: str) -> Any:
    kind = str(item.type)
    if kind == "tuple[str, ...]":
        if not isinstance(value, list):
            raise ConfigError(f"{prefix}{item.name} must be a list")
        return tuple(str(entry) for entry in value)
    if kind.startswith("Mapping"):
        if not isinstance(value, dict):
            raise ConfigError(f"{prefix}{item.name} must be a mapping of names to values")
        return {str(name): str(text) for name, text in value.items()}
    expected = {"int": int, "float": (int, float), "bool": bool, "str": str, "str | None": str}
    wanted: Any = expected.get(kind)
    if wanted is not None and (
        not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool)
    ):
        raise ConfigError(f"{prefix}{item.name}={value!r} must be of type {kind}")
    return value


def _check(config: RunConfig) -> None:
    try:
        check_run_id(config.name)
    except ConfigError as error:
        raise ConfigError(f"name: {error}") from None
    if not config.bucket.startswith(("hf://", "s3://")):
        raise ConfigError(
            f"bucket={config.bucket!r} must be hf://buckets/owner/name or s3://bucket/prefix: jobs "
            "share no folder"
        )
    if config.mount_bucket and not config.bucket.startswith("hf://"):
        raise ConfigError("mount_bucket: true needs an hf:// bucket; leave it out")
    if not 1 <= config.replicas.count <= MAX_REPLICAS:
        raise ConfigError(f"replicas.count={config.replicas.count} must be 1 to {MAX_REPLICAS}")
    if not 0 <= config.min_replicas <= config.replicas.count:
        raise ConfigError(
            f"min_replicas={config.min_replicas} must be 0 to {config.replicas.count} "
            "(replicas.count)"
        )
    if not config.trainer.script.is_file():
        raise ConfigError(f"trainer.script: {config.trainer.script} is no file")
    if not re.fullmatch(r"\d+(\.\d+)?[smhd]?", config.timeout):
        raise ConfigError(f"timeout={config.timeout!r} must be a time such as 90m, 6h or 2d")
    for name in (*config.secrets, *config.env):
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a variable; secrets lists names, never values"
            )

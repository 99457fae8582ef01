"""Key names of the bucket, and their way back to (run, version, file). Pure.

Owns every path-like string of the contract. Nothing that was read from a bucket or a request is
joined into a key or a path anywhere else: it first becomes a checked run id, an integer version or
one of the two file names here.
"""

from __future__ import annotations

import re

from adapter_bucket.errors import ConfigError

RUNS_PREFIX = "runs/"
"""Everything the contract owns lives below this prefix of the bucket URL."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files of a version, exactly: a plain PEFT adapter directory."""

MAX_VERSION = 99_999_999
"""Largest policy version: eight digits keep keys sortable by name."""

MAX_STEP = 10**15 - 1
"""Largest optimizer step of a checkpoint, and largest epoch in its keys."""

# First and last character are alphanumeric, so that a run id is never hidden, relative, or an
# option; no "/" and no "%" so that it is the same in a key, a path and a URL.
_RUN_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,78}[A-Za-z0-9])?\Z")
_ADAPTER_NAME = re.compile(r"(?P<run>.+)-v(?P<version>0|[1-9][0-9]{0,7})\Z", re.DOTALL)
_VERSION_KEY = re.compile(r"runs/(?P<run>[^/]+)/adapters/v(?P<version>[0-9]{8})/", re.DOTALL)
_EPOCH_KEY = re.compile(r"runs/[^/]+/epochs/e(?P<epoch>[0-9]{16})-(?P<token>[0-9a-f]{1,64})\Z")
_CHECKPOINT_KEY = re.compile(
    r"runs/(?P<run>[^/]+)/checkpoints/checkpoint-(?P<step>0|[1-9][0-9]{0,14})"
    r"/e(?P<epoch>[1-9][0-9]{0,14})(?:\.json\Z|/)",
    re.DOTALL,
)
# The characters that are the same in a key, a URL and a path of any system. A colon (drive
# letters, streams), a backslash and a space are not among them.
_FILE_PART = re.compile(r"[A-Za-z0-9._+=-]{1,128}\Z")
_MAX_FILE_DEPTH = 6
_HEARTBEAT_KEY = re.compile(r"(?:runs/[^/]+/)?replicas/(?P<replica>[^/]+)\.json\Z")
_MANIFEST_KEY = re.compile(r"runs/(?P<run>[^/]+)/manifest\.json\Z")


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` unchanged if it is one.

    Raises:
        ConfigError: it is not 1 to 80 characters of ``[A-Za-z0-9._-]`` with an alphanumeric first
            and last one.
    """
    if not _RUN_ID.match(run_id):
        shown = run_id if len(run_id) <= 100 else f"{run_id[:100]}… ({len(run_id)} characters)"
        raise ConfigError(
            f"run id {shown!r} is not valid: use 1 to 80 characters of letters, digits, '.', '_' "
            "and '-', starting and ending with a letter or digit"
        )
    return run_id


def check_version(version: int) -> int:
    """Return ``version`` unchanged if it is a policy version that can be published.

    Raises:
        ConfigError: it is outside 1…99,999,999. Version 0 is the untrained policy and has no files.
    """
    if not 1 <= version <= MAX_VERSION:
        raise ConfigError(f"policy version {version} is outside 1…{MAX_VERSION}")
    return version


def run_prefix(run_id: str) -> str:
    """Prefix of everything that belongs to a run."""
    return f"{RUNS_PREFIX}{check_run_id(run_id)}/"


def manifest_key(run_id: str) -> str:
    """Key of the run's manifest, the only object that is polled."""
    return f"{run_prefix(run_id)}manifest.json"


def adapters_prefix(run_id: str) -> str:
    """Prefix of all versions of a run."""
    return f"{run_prefix(run_id)}adapters/"


def version_dir(version: int) -> str:
    """Directory name of a version, ``v00000012``."""
    return f"v{check_version(version):08d}"


def file_key(run_id: str, version: int, file: str) -> str:
    """Key of one file of one version.

    Raises:
        ConfigError: ``file`` is not one of the two names in ``ADAPTER_FILES``.
    """
    if file not in ADAPTER_FILES:
        raise ConfigError(f"adapter file {file!r} is not one of {', '.join(ADAPTER_FILES)}")
    return f"{adapters_prefix(run_id)}{version_dir(version)}/{file}"


def parse_version_key(key: str) -> tuple[str, int] | None:
    """(run id, version) of a key below a version's directory, or ``None`` for any other key."""
    match = _VERSION_KEY.match(key)
    if match is None or not _RUN_ID.match(match["run"]) or not int(match["version"]):
        return None
    return match["run"], int(match["version"])


def epochs_prefix(run_id: str) -> str:
    """Prefix of the claims that fence writers where the store has no conditional writes."""
    return f"{run_prefix(run_id)}epochs/"


def epoch_key(run_id: str, epoch: int, token: str) -> str:
    """Key of one claim: unique, so that no claim overwrites another one."""
    return f"{epochs_prefix(run_id)}e{epoch:016d}-{token}"


def parse_epoch_key(key: str) -> tuple[int, str] | None:
    """(epoch, token) of a claim's key, or ``None`` for any other key."""
    match = _EPOCH_KEY.match(key)
    return (int(match["epoch"]), match["token"]) if match else None


def checkpoints_prefix(run_id: str) -> str:
    """Prefix of all checkpoints of a run."""
    return f"{run_prefix(run_id)}checkpoints/"


def checkpoint_dir(step: int) -> str:
    """Directory name of a checkpoint, as Hugging Face trainers write it: ``checkpoint-500``.

    Raises:
        ConfigError: the step is outside 0…10¹⁵ - 1.
    """
    if not 0 <= step <= MAX_STEP:
        raise ConfigError(f"checkpoint step {step} is outside 0…{MAX_STEP}")
    return f"checkpoint-{step}"


def checkpoint_prefix(run_id: str, step: int, epoch: int) -> str:
    """Prefix of the files of one checkpoint. The epoch makes it the property of one writer."""
    return f"{checkpoints_prefix(run_id)}{checkpoint_dir(step)}/e{epoch}/"


def checkpoint_index_key(run_id: str, step: int, epoch: int) -> str:
    """Key of the document that lists a checkpoint's files."""
    return f"{checkpoint_prefix(run_id, step, epoch).removesuffix('/')}.json"


def checkpoint_file_key(run_id: str, step: int, epoch: int, file: str) -> str:
    """Key of one file of a checkpoint; see ``check_checkpoint_file``."""
    return f"{checkpoint_prefix(run_id, step, epoch)}{check_checkpoint_file(file)}"


def check_checkpoint_file(name: str) -> str:
    """Return ``name`` unchanged if it is a plain relative file name, safe in keys and in paths.

    Raises:
        ConfigError: it is not 1 to 6 parts of ``[A-Za-z0-9._+=-]`` joined by ``/``; a part is
            ``.`` or ``..``, or one that a folder as a bucket keeps for itself.
    """
    parts = name.split("/")
    for part in parts:
        kept = part in (".", "..") or part.startswith(".tmp-") or part.endswith((".lock", "."))
        if kept or not _FILE_PART.match(part) or len(parts) > _MAX_FILE_DEPTH:
            raise ConfigError(
                f"checkpoint file {name[:200]!r} cannot be stored: use 1 to {_MAX_FILE_DEPTH} "
                "names of letters, digits and '._+=-' joined by '/', without '.', '..', '.tmp-…' "
                "and '….lock'"
            )
    return name


def parse_checkpoint_key(key: str) -> tuple[str, int, int] | None:
    """(run id, step, epoch) of a key that belongs to a checkpoint, or ``None`` for any other."""
    match = _CHECKPOINT_KEY.match(key)
    if match is None or not _RUN_ID.match(match["run"]):
        return None
    return match["run"], int(match["step"]), int(match["epoch"])


def probe_key(token: str) -> str:
    """Key of a short-lived object that tests what the store can do."""
    return f"probes/{token}"


def replicas_prefix(run_id: str | None) -> str:
    """Prefix of the heartbeats of the replicas that serve a run; ``None``: of all replicas."""
    return "replicas/" if run_id is None else f"{run_prefix(run_id)}replicas/"


def heartbeat_key(run_id: str | None, replica_id: str) -> str:
    """Key of one replica's heartbeat. A replica id follows the rules of a run id."""
    return f"{replicas_prefix(run_id)}{check_run_id(replica_id)}.json"


def adapter_name(run_id: str, version: int) -> str:
    """Model name of a version in vLLM, ``<run_id>-v<N>``: one name, one set of bytes, for ever."""
    return f"{check_run_id(run_id)}-v{check_version(version)}"


def parse_adapter_name(name: str) -> tuple[str, int] | None:
    """Split a model name into (run id, version), or ``None`` if it is not an adapter name.

    Version 0 (the untrained policy) is parsed too, so that a request for it gets a clear answer.
    """
    match = _ADAPTER_NAME.match(name)
    if match is None or not _RUN_ID.match(match["run"]):
        return None
    return match["run"], int(match["version"])


def parse_heartbeat_key(key: str) -> str | None:
    """Replica id of a heartbeat's key, or ``None`` for any other key."""
    match = _HEARTBEAT_KEY.match(key)
    return match["replica"] if match and _RUN_ID.match(match["replica"]) else None


def parse_manifest_key(key: str) -> str | None:
    """Run id of a manifest key, or ``None`` for any other key (also for a hostile run name)."""
    match = _MANIFEST_KEY.match(key)
    if match is None or not _RUN_ID.match(match["run"]):
        return None
    return match["run"]

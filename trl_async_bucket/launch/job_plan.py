"""From a run's description to the jobs that make it up. Pure: nothing is started here."""

from __future__ import annotations

import base64
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from trl_async_bucket.launch.run_config import RunConfig

PORT = 8000
TOKEN_NAME = "HF_TOKEN"
MOUNT_PATH = "/bucket"
SCRIPT_PATH = "/tmp/train.py"
SCRIPT_ENV = "BUCKET_LORA_SCRIPT"
"""The training script, compressed, as text. A job has no other way in without another upload."""
MAX_SCRIPT_CHARS = 64 * 1024

LAUNCH_LABEL = "bucket-lora-launch"
"""Label of all jobs of one launch: by it they are found even if the answer to a start was lost."""

_UNPACK = (
    f"import base64, os, zlib; packed = base64.b64decode(os.environ['{SCRIPT_ENV}']); "
    f"open({SCRIPT_PATH!r}, 'wb').write(zlib.decompress(packed))"
)


@dataclass(frozen=True)
class BucketMount:
    """An ``hf://`` bucket mounted into a job."""

    source: str
    path: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, as it will be asked for. Secrets by name only."""

    name: str
    image: str
    flavor: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    secret_names: tuple[str, ...]
    timeout: str
    mount: BucketMount | None = None
    expose: tuple[int, ...] = field(default=())


def bucket_url(config: RunConfig) -> str:
    """The bucket as the jobs reach it."""
    return f"file://{MOUNT_PATH}" if config.mount_bucket else config.bucket


def hf_bucket(config: RunConfig) -> BucketMount | None:
    """Owner and name of an ``hf://`` bucket, and the prefix inside; ``None`` for another store.

    Raises:
        ConfigError: the URL is incomplete.
    """
    parts = urlsplit(config.bucket)
    if parts.scheme != "hf":
        return None
    owner, _, rest = parts.path.strip("/").partition("/")
    name, _, prefix = rest.partition("/")
    if parts.netloc != "buckets" or not owner or not name:
        raise ConfigError(f"bucket={config.bucket!r} must be hf://buckets/owner/name[/prefix]")
    return BucketMount(f"{owner}/{name}", prefix or None)


def secret_names(config: RunConfig) -> tuple[str, ...]:
    """Variables that every job gets as secrets, the token first."""
    return tuple(dict.fromkeys((TOKEN_NAME, *config.secrets)))


def replica_jobs(config: RunConfig) -> list[Job]:
    """The vLLM jobs."""
    serve = [
        "vllm", "serve", config.model, "--host", "0.0.0.0", "--port", str(PORT),
        "--enable-lora", "--plugin", "bucket-lora", "--bucket-lora-url", bucket_url(config),
        "--bucket-lora-runs", config.name, *config.replicas.args,
    ]  # fmt: skip
    command = _shell(_install(config.replicas.install), serve)
    return [
        Job(
            name=f"{config.name}-replica-{number}",
            image=config.replicas.image,
            flavor=config.replicas.flavor,
            command=command,
            env=dict(config.env),
            secret_names=secret_names(config),
            timeout=config.timeout,
            mount=hf_bucket(config) if config.mount_bucket else None,
            expose=(PORT,),
        )
        for number in range(1, config.replicas.count + 1)
    ]


def trainer_job(config: RunConfig, replica_urls: Sequence[str]) -> Job:
    """The trainer's job: the script, with the proxy beside it.

    Raises:
        ConfigError: the script is too large.
    """
    packed = base64.b64encode(zlib.compress(config.trainer.script.read_bytes(), 9)).decode()
    if len(packed) > MAX_SCRIPT_CHARS:
        raise ConfigError(
            f"trainer.script: {config.trainer.script.name} has {len(packed)} characters when "
            f"packed, more than {MAX_SCRIPT_CHARS}: put its modules into a package, and name that "
            "in trainer.install"
        )
    train = [
        "python3", "-m", "trl_async_bucket", "run", "--bucket-url", bucket_url(config),
        "--bucket-run-id", config.name, SCRIPT_PATH, *config.trainer.args,
    ]  # fmt: skip
    proxied = ["python3", "-m", "trl_async_bucket.launch", "with-proxy", "--port", str(PORT)]
    for url in replica_urls:
        proxied += ["--replica", url]
    # What is behind a job's public address asks for a token of the jobs' owner.
    proxied += ["--replica-token-env", TOKEN_NAME, "--", *train]
    return Job(
        name=f"{config.name}-trainer",
        image=config.trainer.image,
        flavor=config.trainer.flavor,
        command=_shell(_install(config.trainer.install), ["python3", "-c", _UNPACK], proxied),
        env={**config.env, SCRIPT_ENV: packed},
        secret_names=secret_names(config),
        timeout=config.timeout,
        mount=hf_bucket(config) if config.mount_bucket else None,
    )


def check_no_secret(config: RunConfig, jobs: Sequence[Job], secrets: Mapping[str, str]) -> None:
    """Script, environment and command lines are shown on the platform's pages: no secret in them.

    Raises:
        ConfigError: names the secret and the place, never the value.
    """
    script = config.trainer.script.read_text(encoding="utf-8", errors="replace")
    for name, value in secrets.items():
        if value and value in script:
            raise ConfigError(
                f"the value of {name} stands in {config.trainer.script.name}: read it from the "
                "environment there, and list its name in secrets"
            )
    for job in jobs:
        for name, value in secrets.items():
            if not value:
                continue
            if any(value in part for part in job.command):
                raise ConfigError(f"the value of {name} stands in the command of {job.name}")
            if holders := [key for key, text in job.env.items() if value in text]:
                raise ConfigError(
                    f"the value of {name} stands in env.{holders[0]}: list its name in secrets"
                )


def describe(job: Job) -> str:
    """What a person sees of a job before it is started."""
    lines = [
        f"{job.name}  ({job.flavor}, {job.image}, at most {job.timeout})",
        f"    {job.command[-1]}",
    ]
    env = {
        key: f"<{len(value)} characters>" if key == SCRIPT_ENV else value
        for key, value in job.env.items()
    }
    if env:
        lines.append(f"    env {' '.join(f'{key}={value}' for key, value in env.items())}")
    lines.append(f"    secrets {' '.join(job.secret_names)}")
    if job.mount is not None:
        lines.append(f"    mount {job.mount.source} at {MOUNT_PATH}")
    return "\n".join(lines)


def _install(requirement: str) -> list[str]:
    if not requirement:
        return []
    # Not `pip`: an image may have several Pythons, and this one will run what is installed.
    return ["python3", "-m", "pip", "install", "--quiet", requirement]


def _shell(*commands: Sequence[str]) -> tuple[str, ...]:
    """The commands one after the other; the last replaces the shell, so that signals reach it."""
    *before, last = [shlex.join(command) for command in commands if command]
    return ("bash", "-c", " && ".join([*before, f"exec {last}"]))

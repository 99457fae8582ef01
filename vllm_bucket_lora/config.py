"""The settings of the plugin: flags of ``vllm serve``, environment variables, one frozen object.

Owns names, types and defaults. Values are resolved once, when the command line is parsed, and
travel to every API server process inside the parsed arguments.
"""

from __future__ import annotations

import os
import secrets
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id
from adapter_bucket.signing import KEYS_VARIABLE, SigningKeys

PLUGIN_NAME = "bucket-lora"
SESSION_ENV = "BUCKET_LORA_SESSION_DIR"
"""Set by the plugin itself, never by people: tells engine processes that it is switched on."""
URL_ENV = "BUCKET_LORA_URL"
"""The bucket: people may set it, and the plugin sets it for the engine processes."""

MIN_POLL_S = 0.01
MAX_POLL_S = 3600.0
MAX_REQUEST_WAIT_S = 600.0


def _seconds(text: str) -> float:
    value = float(text)
    if not MIN_POLL_S <= value <= MAX_POLL_S:
        raise ValueError
    return value


def _patience(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= MAX_REQUEST_WAIT_S:
        raise ValueError
    return value


def _web_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError
    return text.rstrip("/")


@dataclass(frozen=True)
class Option:
    """One setting: ``--bucket-lora-<name>``, or ``BUCKET_LORA_<NAME>`` where no flag is given."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        return f"--bucket-lora-{self.name}"

    @property
    def env(self) -> str:
        return f"BUCKET_LORA_{self.name.upper().replace('-', '_')}"

    @property
    def dest(self) -> str:
        return f"bucket_lora_{self.name.replace('-', '_')}"

    def resolve(self, given: str | None, environ: Mapping[str, str]) -> Any:
        """Value from the flag, else from the environment, else the default.

        Raises:
            ConfigError: the text cannot be read as a value; the message names where it stands.
        """
        source, text = (
            (self.flag, given) if given is not None else (self.env, environ.get(self.env))
        )
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except ValueError:
            raise ConfigError(f"{source}={text!r} is not valid: {self.help}") from None


OPTIONS = (
    Option("url", str, None, "URL", "bucket to follow: s3://bucket/prefix or file:///directory"),
    Option("runs", str, "*", "GLOB", "run ids to follow, as a shell pattern (default: all)"),
    Option(
        "poll-s",
        _seconds,
        0.5,
        "SECONDS",
        f"seconds between two looks at a busy run's manifest, {MIN_POLL_S} to {MAX_POLL_S:g} "
        "(default: 0.5; a client that waits for a version makes the server look at once)",
    ),
    Option(
        "cache-dir",
        Path,
        None,
        "DIR",
        "local directory for verified adapters (default: /dev/shm, else the temporary directory); "
        "each server makes, and removes, a directory of its own in it",
    ),
    Option(
        "base-model",
        str,
        None,
        "NAME",
        "the served base model as trainers name it (default: the model argument); runs trained "
        "on another one are refused",
    ),
    Option(
        "replica-id",
        check_run_id,
        None,
        "ID",
        "name of this server in status and heartbeats (default: host, port and a random part)",
    ),
    Option(
        "public-url",
        _web_url,
        None,
        "URL",
        "where proxies reach this server, for its heartbeats (default: made of --host and --port)",
    ),
    Option(
        "signing-key-file",
        Path,
        None,
        "FILE",
        f"file with the keys of manifests, in the form of {KEYS_VARIABLE}; with keys, unsigned "
        "manifests are refused",
    ),
    Option(
        "request-wait-s",
        _patience,
        10.0,
        "SECONDS",
        f"longest wait of a request whose version is published but not loaded yet, 0 to "
        f"{MAX_REQUEST_WAIT_S:g} (default: 10)",
    ),
)


@dataclass(frozen=True)
class BucketLoraConfig:
    """Everything the plugin was told. Equal in all processes of one server."""

    url: str
    runs: str
    """Shell pattern over run ids."""
    poll_s: float
    """Seconds between two polls of a busy run. Half a second keeps an unprompted pick-up well below
    a training step, at two conditional GETs a second."""
    session_dir: Path
    """Private to the processes of this server; holds adapters and their shared state."""
    base_model: str
    """The base model's name, for the comparison with what a run was trained on."""
    replica_id: str
    public_url: str
    """Where others reach this server; goes into its heartbeats."""
    request_wait_s: float
    """Longest wait of a request for its version. Ten seconds cover a slow download, and end well
    before the usual limits of clients and gateways."""


def resolve_options(args: Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Replace the option texts in ``args`` by their values.

    Raises:
        ConfigError: a value is malformed, or no URL is given.
    """
    for option in OPTIONS:
        setattr(args, option.dest, option.resolve(getattr(args, option.dest, None), environ))
    if not args.bucket_lora_url:
        raise ConfigError(
            f"--plugin {PLUGIN_NAME} needs a bucket to follow: add --bucket-lora-url URL or set "
            "BUCKET_LORA_URL"
        )
    args.bucket_lora_token = secrets.token_hex(3)


def load_signing_keys(path: Path | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Check the signing keys, and hand those of a file on to every process of the server.

    Raises:
        ConfigError: the file cannot be read, or the keys are malformed.
    """
    if path is not None:
        try:
            text = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--bucket-lora-signing-key-file: cannot read it: {error}") from None
        if not text:
            raise ConfigError(f"--bucket-lora-signing-key-file: {path} is empty")
        environ[KEYS_VARIABLE] = text
    SigningKeys.from_env(environ)


def config_from_args(args: Namespace, *, model: str) -> BucketLoraConfig:
    """The settings of this server, from arguments that went through ``resolve_options``."""
    replica_id = args.bucket_lora_replica_id or _default_replica_id(
        args.port, args.bucket_lora_token
    )
    return BucketLoraConfig(
        url=args.bucket_lora_url,
        runs=args.bucket_lora_runs,
        poll_s=args.bucket_lora_poll_s,
        # One directory per port: a supervisor may start several servers from one command line.
        session_dir=Path(args.bucket_lora_session_dir) / f"port-{args.port}",
        base_model=args.bucket_lora_base_model or model,
        replica_id=replica_id,
        public_url=args.bucket_lora_public_url or _default_url(args),
        request_wait_s=args.bucket_lora_request_wait_s,
    )


def _default_url(args: Namespace) -> str:
    host = getattr(args, "host", None)
    if host in (None, "", "0.0.0.0", "::"):  # any address: name one that others can use
        host = socket.gethostname()
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"


def _default_replica_id(port: int, token: str) -> str:
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    return check_run_id(f"{host.strip('-.')[:50] or 'host'}-{port}-{token}")

"""Every setting of the proxy: one frozen object, read once from flags, environment and files."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bucket_lora_proxy.auth import check_token, read_tokens
from bucket_lora_proxy.config_file import read_config_file
from bucket_lora_proxy.upstream import Origin

from adapter_bucket.errors import ConfigError

TOKEN_ENV = "BUCKET_LORA_PROXY_TOKEN"
"""Token(s) that clients must present, separated by white space."""

REPLICA_TOKEN_ENV = "BUCKET_LORA_REPLICA_TOKEN"
"""Token that the proxy presents to replicas."""


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Effective settings. Tokens are left out of the representation."""

    replicas: tuple[Origin, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Accepted bearer tokens, several for rotation; empty: no authentication."""
    replica_token: str | None = field(default=None, repr=False)
    replica_ca: Path | None = None
    """Certificate authorities of the replicas; default: the system's."""
    insecure_public_bind: bool = False
    allow_broadcast: bool = False
    """Pass the state-changing calls of stock TRL on to all replicas. Off: they let a client name
    any path on a replica."""
    broadcast_wait_s: float = 120.0
    """How long one such call may take, and how long a mount may lag behind the trainer."""
    pause_lease_s: float = 600.0
    """Time after which a paused fleet is resumed by itself: above TRL's own limits for a sync."""
    adapter_wait_s: float = 30.0
    """How long a generation waits for its adapter; covers publish to ready several times over."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body: 100,000 token ids are below 1 MiB, base64 images may need more."""
    max_answer_bytes: int = 256 * 1024 * 1024
    """Largest non-streamed answer; logprobs of long completions are the large case."""
    body_timeout_s: float = 60.0
    """Longest time a client may take to send a request body."""
    response_timeout_s: float = 1800.0
    """Longest silence of a replica inside a generation. Above TRL's own request limit, so that
    the trainer gives up first and its log says so."""
    connect_timeout_s: float = 5.0
    control_timeout_s: float = 5.0
    """Limit of a status, health or model-list call."""
    poll_s: float = 0.25
    """Pause between two status calls to a replica: how long a change can go unseen."""
    unresponsive_s: float = 15.0
    """How long a replica may fail its status calls before its unanswered requests go elsewhere."""
    keep_alive_s: float = 4.0
    """Idle connections are reused up to this age; vLLM closes them at 5 s."""
    max_connections: int = 1024
    """Connections for generations to one replica: above vLLM's default of 256 running requests."""
    max_attempts: int = 3
    """Replicas that are asked for one generation before it fails."""
    min_healthy: int = 1
    """Healthy replicas from which ``/health`` answers 200."""
    shutdown_s: float = 30.0
    """How long running requests may take to finish after SIGTERM."""


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> ProxyConfig:
    """Read flags, the config file and the environment; flags win over the file.

    Raises:
        ConfigError: a value is wrong, a file can't be read, or the bind would be public without
            protection. ``SystemExit`` for an unknown flag, as usual for argparse.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.config is not None:
        settings = read_config_file(args.config, parser)
        replicas = settings.pop("replica", [])
        parser.set_defaults(**settings)
        args = parser.parse_args(argv)
        args.replica = args.replica or replicas  # flags replace the list, they do not extend it
    tokens = _tokens(args.token_file, environ, TOKEN_ENV)
    replica_tokens = _tokens(args.replica_token_file, environ, REPLICA_TOKEN_ENV)
    if len(replica_tokens) > 1:
        raise ConfigError(f"{len(replica_tokens)} replica tokens are given; exactly one is used")
    not_settings = {"config", "check", "replica", "token_file", "replica_token_file"}
    config = ProxyConfig(
        replicas=tuple(Origin.parse(url) for url in args.replica),
        tokens=tokens,
        replica_token=replica_tokens[0] if replica_tokens else None,
        **{name: value for name, value in vars(args).items() if name not in not_settings},
    )
    check_config(config)
    return config


def check_config(config: ProxyConfig) -> None:
    """Refuse settings that cannot work or are not safe.

    Raises:
        ConfigError: says which setting, and what to do.
    """
    urls = [origin.url for origin in config.replicas]
    if not urls:
        raise ConfigError("no replica is given; add --replica URL at least once")
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"replica {url} is given {urls.count(url)} times; give it once")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; only one of them is given")
    for flag, path in (
        ("--tls-cert", config.tls_cert),
        ("--tls-key", config.tls_key),
        ("--replica-ca", config.replica_ca),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"{flag} {path} is not a readable file")
    for name in (
        "poll_s",
        "broadcast_wait_s",
        "pause_lease_s",
        "connect_timeout_s",
        "control_timeout_s",
        "response_timeout_s",
    ):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it must be above 0")
    for name in ("max_connections", "max_attempts", "min_healthy", "max_body_bytes"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{_flag(name)} is {getattr(config, name)}; it must be at least 1")
    _check_bind(config)


def _check_bind(config: ProxyConfig) -> None:
    if is_loopback(config.host) or config.insecure_public_bind:
        return
    missing = []
    if config.tls_cert is None:
        missing.append("TLS (--tls-cert, --tls-key)")
    if not config.tokens:
        missing.append(f"a token (--token-file or {TOKEN_ENV})")
    if missing:
        raise ConfigError(
            f"--host {config.host} can be reached from other machines and "
            f"{' and '.join(missing)} is missing; add it, bind to 127.0.0.1, or accept the risk "
            "with --insecure-public-bind"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tokens(path: Path | None, environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    if path is not None:
        return read_tokens(path)
    tokens = tuple(environ.get(variable, "").split())
    for token in tokens:
        check_token(token, f"environment variable {variable}")
    return tokens


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bucket-lora-proxy",
        description="One address for several vLLM replicas that serve LoRA policy versions.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML file of settings named like the flags")
    add("--check", action="store_true", help="check the settings, print them, and stop")
    add("--replica", action="append", default=[], metavar="URL", help="base URL; repeatable")
    add("--host", default=ProxyConfig.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=ProxyConfig.port, help="0 picks a free one (%(default)s)")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="private key, PEM")
    add("--token-file", type=Path, metavar="FILE", help=f"one token a line; or {TOKEN_ENV}")
    add("--replica-token-file", type=Path, metavar="FILE", help=f"or {REPLICA_TOKEN_ENV}")
    add("--replica-ca", type=Path, metavar="FILE", help="authorities of the replicas, PEM")
    add(
        "--insecure-public-bind",
        action="store_true",
        help="listen on a public address without TLS or token",
    )
    add(
        "--allow-broadcast",
        action="store_true",
        help="pass adapter loads, pause and resume of stock TRL on to all replicas",
    )
    for name, help_text in (
        ("broadcast_wait_s", "limit of a broadcast call, and of a mount that lags behind"),
        ("pause_lease_s", "time after which a paused fleet is resumed"),
        ("adapter_wait_s", "longest wait of a generation for its adapter"),
        ("max_body_bytes", "largest request body"),
        ("max_answer_bytes", "largest answer that is not streamed"),
        ("body_timeout_s", "longest time to receive a request body"),
        ("response_timeout_s", "longest silence of a replica in a generation"),
        ("connect_timeout_s", "limit of a connect to a replica"),
        ("control_timeout_s", "limit of a status call"),
        ("poll_s", "pause between status calls"),
        ("unresponsive_s", "silence after which a replica's requests go elsewhere"),
        ("keep_alive_s", "age up to which idle connections are reused"),
        ("max_connections", "generations in flight per replica"),
        ("max_attempts", "replicas asked for one generation"),
        ("min_healthy", "healthy replicas from which /health answers 200"),
        ("shutdown_s", "time to finish running requests on SIGTERM"),
    ):
        default = getattr(ProxyConfig, name)
        add(_flag(name), type=type(default), default=default, help=f"{help_text} (%(default)s)")
    return parser

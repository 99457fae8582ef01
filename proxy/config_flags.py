"""The command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from bucket_lora_proxy.config import ProxyConfig

TOKEN_ENV = "BUCKET_LORA_PROXY_TOKEN"
"""Token(s) that clients must present, separated by white space."""

REPLICA_TOKEN_ENV = "BUCKET_LORA_REPLICA_TOKEN"
"""Token that the proxy presents to replicas, where no other variable is named."""


_LIMITS = {
    "broadcast_wait_s": "limit of a broadcast call, and of a mount that lags behind",
    "pause_lease_s": "time after which a paused fleet is resumed",
    "adapter_wait_s": "longest wait of a generation for its adapter",
    "max_body_bytes": "largest request body",
    "max_answer_bytes": "largest answer that is not streamed",
    "body_timeout_s": "longest time to receive a request body",
    "response_timeout_s": "longest silence of a replica in a generation",
    "connect_timeout_s": "limit of a connect to a replica",
    "control_timeout_s": "limit of a status call",
    "poll_s": "pause between status calls",
    "bucket_poll_s": "pause between looks at the heartbeats",
    "max_replicas": "members of the fleet at most",
    "slow_start_s": "time in which a replica that (re)joins gets its share step by step",
    "unresponsive_s": "silence after which a replica's requests go elsewhere",
    "keep_alive_s": "age up to which idle connections are reused",
    "max_connections": "generations in flight per replica",
    "max_attempts": "replicas asked for one generation",
    "min_healthy": "healthy replicas from which /health answers 200",
    "shutdown_s": "time to finish running requests on SIGTERM",
}


def flag(name: str) -> str:
    """Flag of a setting."""
    return "--" + name.replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    """The parser; every flag is a setting of the config file too, but for ``--config``."""
    parser = argparse.ArgumentParser(
        prog="bucket-lora-proxy",
        description="One address for several vLLM replicas that serve LoRA policy versions.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML file of settings named like the flags")
    add(
        "--check",
        action="store_true",
        help="check the settings, read the bucket once, print both, and stop",
    )
    _add_replicas(parser.add_argument_group("replicas"))
    _add_clients(parser.add_argument_group("clients"))
    limits = parser.add_argument_group("limits")
    for name, help_text in _LIMITS.items():
        default = getattr(ProxyConfig, name)
        shown = f"{help_text} (%(default)s)"
        limits.add_argument(flag(name), type=type(default), default=default, help=shown)
    return parser


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument

    def add_list(name: str, metavar: str, help_text: str) -> None:
        add(name, action="append", default=[], metavar=metavar, help=f"{help_text}; repeatable")

    add_list("--replica", "URL", "base URL of a replica")
    add("--bucket", metavar="URL", help="take in the replicas whose heartbeats this bucket holds")
    add_list("--bucket-run", "RUN", "only those that serve this run")
    add_list(
        "--allow-replica",
        "PATTERN",
        "addresses in the bucket that may be used, as 'https://*.example.org'",
    )
    add("--replica-token-file", type=Path, metavar="FILE", help="token that replicas are sent")
    add(
        "--replica-token-env",
        default=REPLICA_TOKEN_ENV,
        metavar="NAME",
        help="or the variable that holds it (%(default)s)",
    )
    add("--replica-ca", type=Path, metavar="FILE", help="authorities of the replicas, PEM")
    add("--replica-cert", type=Path, metavar="FILE", help="certificate shown to replicas, PEM")
    add("--replica-key", type=Path, metavar="FILE", help="its private key, PEM")
    add(
        "--allow-broadcast",
        action="store_true",
        help="pass adapter loads, pause and resume of stock TRL on to all replicas",
    )


def _add_clients(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default=ProxyConfig.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=ProxyConfig.port, help="0 picks a free one (%(default)s)")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="private key, PEM")
    add("--dev-cert", type=Path, metavar="DIR", help="self-signed certificate, made in this folder")
    add("--client-ca", type=Path, metavar="FILE", help="clients must have a certificate of these")
    add("--token-file", type=Path, metavar="FILE", help=f"one token a line; or {TOKEN_ENV}")
    add(
        "--insecure-public-bind",
        action="store_true",
        help="listen on a public address without TLS or token",
    )

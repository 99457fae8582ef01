"""Settings that cannot work, or are not safe, are refused before anything starts."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import fields

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id
from adapter_bucket.stores import SCHEMES
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.config_flags import TOKEN_ENV, flag


def check_config(config: ProxyConfig) -> None:
    """Refuse settings that cannot work or are not safe.

    Raises:
        ConfigError: says which setting, and what to do.
    """
    urls = [origin.url for origin in config.replicas]
    if not urls and config.bucket is None:
        raise ConfigError("no replica is given; add --replica URL, or --bucket URL")
    _check_bucket(config)
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"replica {url} is given {urls.count(url)} times; give it once")
    _check_tls(config)
    _check_numbers(config)
    if len(urls) > config.max_replicas:
        raise ConfigError(
            f"{len(urls)} replicas are given; --max-replicas allows {config.max_replicas}"
        )
    _check_bind(config)


_ABOVE_0_S = (
    "poll_s", "bucket_poll_s", "broadcast_wait_s", "pause_lease_s", "connect_timeout_s",
    "control_timeout_s", "response_timeout_s",
)  # fmt: skip
"""Times that would mean "never" or "at once" otherwise; the others may be 0."""


def _check_numbers(config: ProxyConfig) -> None:
    for name in (field.name for field in fields(config) if field.name.endswith("_s")):
        seconds = getattr(config, name)
        if not math.isfinite(seconds):  # a comparison with NaN is never true
            raise ConfigError(f"{flag(name)} is {seconds}; give it in seconds")
        above_0 = name in _ABOVE_0_S
        if seconds < 0 or (above_0 and seconds == 0):
            least = "above 0" if above_0 else "0 or above"
            raise ConfigError(f"{flag(name)} is {seconds}; it must be {least}")
    for name in (
        "max_connections",
        "max_attempts",
        "max_replicas",
        "min_healthy",
        "max_body_bytes",
    ):
        if getattr(config, name) < 1:
            raise ConfigError(f"{flag(name)} is {getattr(config, name)}; it must be at least 1")


def _check_tls(config: ProxyConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; only one of them is given")
    if (config.replica_cert is None) != (config.replica_key is None):
        raise ConfigError("--replica-cert and --replica-key belong together; one is missing")
    if config.dev_cert is not None and config.tls_cert is not None:
        raise ConfigError("--dev-cert and --tls-cert exclude each other; keep one of them")
    if config.client_ca is not None and not config.serves_tls:
        raise ConfigError("--client-ca needs TLS: add --tls-cert and --tls-key, or --dev-cert")
    for name, path in (
        ("--tls-cert", config.tls_cert),
        ("--tls-key", config.tls_key),
        ("--client-ca", config.client_ca),
        ("--replica-ca", config.replica_ca),
        ("--replica-cert", config.replica_cert),
        ("--replica-key", config.replica_key),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name} {path} is not a readable file")


def _check_bucket(config: ProxyConfig) -> None:
    if config.bucket is None:
        if config.allow_replicas or config.bucket_runs:
            raise ConfigError("--allow-replica and --bucket-run need --bucket URL")
        return
    if not config.bucket.startswith(SCHEMES):
        raise ConfigError(f"--bucket {config.bucket!r} is no bucket URL: {', '.join(SCHEMES)}")
    if not config.allow_replicas:
        raise ConfigError(
            "--bucket needs --allow-replica: an address from a bucket is sent prompts and a token "
            "only if a pattern such as 'https://*.example.org' allows it"
        )
    for run_id in config.bucket_runs:
        check_run_id(run_id)


def _check_bind(config: ProxyConfig) -> None:
    if is_loopback(config.host) or config.insecure_public_bind:
        return
    missing = []
    if not config.serves_tls:
        missing.append("TLS (--tls-cert, --tls-key)")
    if not config.tokens and config.client_ca is None:
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

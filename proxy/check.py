"""``bucket-lora-proxy --check``: what the settings come to, without any secret."""

from __future__ import annotations

import ssl
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from adapter_bucket.errors import ConfigError
from adapter_bucket.stores import open_store
from bucket_lora_proxy.certificates import replica_context
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.membership.heartbeats import HeartbeatFollower


def report(config: ProxyConfig, *, now: datetime | None = None) -> str:
    """Effective settings, one a line, as they would stand in a config file.

    Raises:
        ConfigError: the certificate, the key or the authorities cannot be used.
    """
    lines = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "replicas":
            shown = ", ".join(origin.url for origin in value) or "none"
        elif field.name == "tokens":
            shown = f"{len(value)} tokens" if value else "none: no authentication"
        elif field.name == "replica_token":
            shown = "set" if value else "none"
        elif field.name == "replica_tokens":
            shown = f"own ones for {', '.join(sorted(value))}" if value else "none"
        elif field.name == "allow_replicas":
            shown = ", ".join(
                rule.pattern + (" (own token)" if rule.token else "") for rule in value
            )
            shown = shown or "none"
        elif field.name == "bucket_runs":
            shown = ", ".join(value) or "all"
        else:
            shown = "none" if value is None else str(value)
        lines.append(f"{field.name} = {shown}")
    if config.tls_cert is not None and config.tls_key is not None:
        lines.append(_certificate(config.tls_cert, config.tls_key, now or datetime.now(UTC)))
    if config.client_ca is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--client-ca {config.client_ca} holds no certificate authority: {error}"
            ) from error
    replica_context(config)
    return "\n".join(lines)


def bucket_report(config: ProxyConfig) -> tuple[str, bool]:
    """What one look at the bucket comes to: which addresses it names, and which may be used.

    Returns:
        The text, and whether the bucket could be read.
    """
    if config.bucket is None:
        return "", True
    url = config.bucket
    view = HeartbeatFollower(
        lambda: open_store(url),
        runs=config.bucket_runs,
        rules=config.allow_replicas,
        poll_s=config.bucket_poll_s,
        deliver=lambda _: None,
    ).look()
    if view.fault is not None:
        return f"bucket {url} cannot be read: {view.fault}", False
    lines = [f"bucket {url}: {len(view.replicas)} addresses may be used"]
    lines += [f"  {one} by {found.rule.pattern}" for one, found in view.replicas.items()]
    lines += [f"  not used: {subject}: {reason}" for subject, reason in view.refused.items()]
    return "\n".join(lines), True


def _certificate(cert: Path, key: Path, now: datetime) -> str:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used together: {error}"
        ) from error
    until = certificate.not_valid_after_utc
    if until <= now:
        raise ConfigError(f"the certificate in --tls-cert {cert} expired on {until:%Y-%m-%d}")
    return f"certificate valid until {until:%Y-%m-%d}"

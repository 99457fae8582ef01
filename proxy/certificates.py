"""TLS of both hops: whose certificates are shown, and whose are believed."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.config import ProxyConfig

log = logging.getLogger("bucket_lora_proxy")

VALID_FOR = timedelta(days=30)
RENEW_BEFORE = timedelta(days=1)
"""A development certificate is made anew when so little of its life is left at a start."""

CERT_FILE = "cert.pem"
"""What clients are told to trust."""
PAIR_FILE = "cert-and-key.pem"
"""What the server loads: both in one file, so that they belong together at any time."""

_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})


def replica_context(config: ProxyConfig) -> ssl.SSLContext:
    """What replicas must show, and what they are shown.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    try:
        context = ssl.create_default_context(cafile=config.replica_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"--replica-ca {config.replica_ca} holds no certificate authority: {error}"
        ) from error
    if config.replica_cert is not None:
        try:
            context.load_cert_chain(config.replica_cert, config.replica_key)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--replica-cert {config.replica_cert} and --replica-key {config.replica_key} "
                f"cannot be used together: {error}"
            ) from error
    return context


def served_certificate(
    config: ProxyConfig, *, now: datetime | None = None
) -> tuple[Path | None, Path | None]:
    """Files with the certificate to serve with, and with its key if it is apart; or two ``None``.

    Makes the development certificate if one is asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    if config.dev_cert is None:
        return config.tls_cert, config.tls_key
    now = now or datetime.now(UTC)
    folder, names = config.dev_cert, subject_names(config.host)
    try:
        certificate = _usable(folder / PAIR_FILE, names, now)
        if certificate is None:
            certificate = _make(folder, names, now)
    except OSError as error:
        raise ConfigError(f"--dev-cert {folder} cannot be written: {error}") from error
    log.info(
        "development certificate %s for %s, valid until %s; clients trust that file",
        folder / CERT_FILE,
        ", ".join(names),
        f"{certificate.not_valid_after_utc:%Y-%m-%d}",
    )
    return folder / PAIR_FILE, None


def subject_names(host: str) -> list[str]:
    """Names and addresses under which clients may reach a server that listens on ``host``."""
    names = ["localhost", "127.0.0.1", "::1"]
    for name in (host, socket.gethostname()):
        if name not in names and name not in _ANY_ADDRESS:
            names.append(name)
    return names


def _usable(path: Path, names: list[str], now: datetime) -> x509.Certificate | None:
    """The certificate that an earlier start made, if it will do."""
    with contextlib.suppress(FileNotFoundError, ValueError, x509.ExtensionNotFound):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        covered = {str(name.value) for name in extension.value}
        if covered >= set(names) and certificate.not_valid_after_utc > now + RENEW_BEFORE:
            return certificate
    return None


def _make(folder: Path, names: list[str], now: datetime) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bucket-lora-proxy development")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of other machines differ
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), False)
        # No authority: whoever trusts it trusts this server and nothing that its key might sign.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / PAIR_FILE, public + private, mode=0o600)
    _write(folder / CERT_FILE, public, mode=0o644)
    return certificate


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Write the whole file or nothing; never readable by others before it should be."""
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
    stage.replace(path)

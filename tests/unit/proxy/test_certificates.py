from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.certificates import (
    CERT_FILE,
    PAIR_FILE,
    RENEW_BEFORE,
    VALID_FOR,
    replica_context,
    served_certificate,
    subject_names,
)
from bucket_lora_proxy.config import ProxyConfig

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def made(folder: Path, host: str = "127.0.0.1", now: datetime = NOW) -> x509.Certificate:
    cert, key = served_certificate(ProxyConfig(dev_cert=folder, host=host), now=now)
    assert (cert, key) == (folder / PAIR_FILE, None)
    return x509.load_pem_x509_certificate((folder / CERT_FILE).read_bytes())


def test_it_is_kept_until_its_last_day_and_then_renewed(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert made(tmp_path, now=NOW + VALID_FOR - RENEW_BEFORE - timedelta(hours=1)) == first
    renewed = made(tmp_path, now=NOW + VALID_FOR - RENEW_BEFORE + timedelta(hours=1))
    assert renewed.serial_number != first.serial_number


def test_it_is_renewed_for_another_host(tmp_path: Path) -> None:
    first = made(tmp_path)
    second = made(tmp_path, host="10.0.0.7")
    assert second != first
    names = second.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.0.0.7" in [str(name) for name in names.get_values_for_type(x509.IPAddress)]
    assert made(tmp_path) == second  # which covers loopback too


def test_a_file_that_holds_something_else_is_replaced(tmp_path: Path) -> None:
    (tmp_path / PAIR_FILE).write_text("nonsense")
    made(tmp_path)


def test_it_is_no_authority(tmp_path: Path) -> None:
    extensions = made(tmp_path).extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_wildcard_addresses_are_no_names() -> None:
    assert "0.0.0.0" not in subject_names("0.0.0.0")
    assert "::" not in subject_names("::")
    assert "proxy.example" in subject_names("proxy.example")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--dev-cert .*file/dev cannot be written"):
        made(tmp_path / "file" / "dev")


def test_files_for_replicas_are_checked(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    with pytest.raises(ConfigError, match=r"--replica-ca .* holds no certificate authority"):
        replica_context(ProxyConfig(replica_ca=other))
    with pytest.raises(ConfigError, match=r"--replica-cert .* cannot be used together"):
        replica_context(ProxyConfig(replica_cert=other, replica_key=other))
    pair = tmp_path / "pair.pem"
    trustme.CA().issue_cert("me").private_key_and_cert_chain_pem.write_to_path(str(pair))
    replica_context(ProxyConfig(replica_cert=pair, replica_key=pair))

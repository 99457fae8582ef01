"""The tasks against SkyPilot's own schema, and the certificates that protect the replicas.

``schemas/skypilot-0.14.1.json`` is what ``sky.utils.schemas.get_task_schema()`` and
``get_resources_schema()`` return; SkyPilot itself brings half a gigabyte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bucket_lora_proxy.config_sources import parse_config
from bucket_lora_proxy.upstream import Origin

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "skypilot"
SCHEMAS = json.loads(
    (Path(__file__).parent / "schemas" / "skypilot-0.14.1.json").read_text(encoding="utf-8")
)


def task(name: str) -> dict[str, Any]:
    document = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("name", ["replicas.yaml", "trainer.yaml"])
def test_the_task_is_valid(name: str) -> None:
    document = task(name)
    jsonschema.validate(document, SCHEMAS["task"])
    jsonschema.validate(document["resources"], SCHEMAS["resources"])
    for source in document["file_mounts"].values():
        assert (FOLDER.parents[1] / source).is_file()


def test_an_unknown_key_would_be_seen() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task("trainer.yaml"), "environment": {}}, SCHEMAS["task"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"use_spott": True}, SCHEMAS["resources"])


def test_trainer_and_replicas_are_spot_machines_in_different_regions() -> None:
    places = {}
    for name in ("replicas.yaml", "trainer.yaml"):
        resources = task(name)["resources"]
        assert resources["use_spot"] is True
        places[name] = {choice["infra"] for choice in resources["any_of"]}
    assert not places["replicas.yaml"] & places["trainer.yaml"]


def test_secrets_have_no_value_in_the_files_and_the_authoritys_key_goes_to_replicas_only() -> None:
    for name in ("replicas.yaml", "trainer.yaml"):
        secrets = task(name)["secrets"]
        assert set(secrets.values()) == {None}
        assert ("REPLICA_CA_KEY" in secrets) == (name == "replicas.yaml")


def test_the_proxy_takes_addresses_of_any_cloud_over_tls_only() -> None:
    patterns = re.findall(r"--allow-replica '(\S+)'", task("trainer.yaml")["run"])
    flags = [word for pattern in patterns for word in ("--allow-replica", pattern)]
    rules = parse_config(["--bucket", "s3://b/rl", *flags], {}).allow_replicas
    for address in ("https://3.0.113.7:8000", "https://203.0.113.7:8000"):
        assert any(rule.allows(Origin.parse(address)) for rule in rules)
    assert not any(rule.allows(Origin.parse("http://203.0.113.7:8000")) for rule in rules)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script calls openssl")
def test_a_replica_proves_that_it_is_one_of_the_run(tmp_path: Path) -> None:
    authority, other = _authority(tmp_path / "ours"), _authority(tmp_path / "theirs")
    subprocess.run(
        ["bash", FOLDER / "certificate.sh", "127.0.0.1", tmp_path / "replica"],
        check=True, env={**os.environ, "REPLICA_CA_CERT": authority.read_text(),
                         "REPLICA_CA_KEY": (authority.parent / "key.pem").read_text()},
    )  # fmt: skip
    assert {path.name for path in (tmp_path / "replica").iterdir()} == {"key.pem", "cert.pem"}
    assert _shakes_hands(tmp_path / "replica", authority, "127.0.0.1")
    assert not _shakes_hands(tmp_path / "replica", other, "127.0.0.1")
    assert not _shakes_hands(tmp_path / "replica", authority, "203.0.113.7")


def _authority(folder: Path) -> Path:
    """As in README.md."""
    folder.mkdir()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "365",
         "-subj", "/CN=bucket-lora", "-keyout", "key.pem", "-out", "ca.pem",
         "-addext", "basicConstraints=critical,CA:TRUE",
         "-addext", "keyUsage=critical,keyCertSign"],
        check=True, cwd=folder, capture_output=True,
    )  # fmt: skip
    return folder / "ca.pem"


def _shakes_hands(replica: Path, authority: Path, name: str) -> bool:
    """Whether a client that trusts ``authority`` alone accepts the server as ``name``."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(replica / "cert.pem", replica / "key.pem")
    client_side = ssl.create_default_context(cafile=str(authority))
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                server_side.wrap_socket(theirs, server_side=True).close()
            except (ssl.SSLError, OSError):
                return  # the client refused; it says so on its side

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        try:
            client_side.wrap_socket(ours, server_hostname=name).close()
            return True
        except ssl.SSLCertVerificationError:
            return False
        finally:
            thread.join(10)

"""Real S3 servers for tests, started once per session: SeaweedFS over HTTP and TLS, and ministack.

``from tests.s3_servers import ministack, seaweed`` in a test module or conftest makes the fixtures
known there. Each server listens on free ports of 127.0.0.1, its data in a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
import trustme
from botocore.exceptions import BotoCoreError, ClientError

from adapter_bucket.s3_settings import S3Settings, make_client
from demo.processes import free_port

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
START_S = 40.0


@dataclass
class S3Server:
    """A running server. ``url`` gives the URL of a bucket made for the caller."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str
    ca_bundle: str | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let a process use the server."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def settings(self, bucket: str, **options: object) -> S3Settings:
        """Settings with explicit credentials."""
        given = {
            "endpoint_url": self.endpoint,
            "ca_bundle": self.ca_bundle,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            **options,
        }
        return S3Settings(bucket=bucket, **given)  # type: ignore[arg-type]

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        bucket = f"test-{uuid.uuid4().hex[:16]}"
        make_client(self.settings(bucket)).create_bucket(Bucket=bucket)
        return bucket

    def url(self, bucket: str, prefix: str = "", **query: str) -> str:
        """URL of a bucket; credentials come from ``environment``."""
        settings = {"endpoint_url": self.endpoint, **query}
        if self.ca_bundle:
            settings["ca_bundle"] = self.ca_bundle
        return f"s3://{bucket}/{prefix}?{urlencode(settings)}"


def write_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Write ``ca.pem``, ``srv.crt`` and ``srv.key`` for 127.0.0.1."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    ca, crt, key = folder / "ca.pem", folder / "srv.crt", folder / "srv.key"
    authority.cert_pem.write_to_path(str(ca))
    certificate.private_key_pem.write_to_path(str(key))
    with crt.open("wb") as file:
        for pem in certificate.cert_chain_pems:
            file.write(pem.bytes())
    return ca, crt, key


def start(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, its output in ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a server at once: its data is thrown away anyway."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_it_stores(server: S3Server, log: Path) -> None:
    """Wait for a successful put, which comes later than the open port."""
    client = make_client(server.settings("ready", connect_timeout_s=1.0, read_timeout_s=5.0))
    deadline = time.monotonic() + START_S
    while True:
        try:
            with suppress(ClientError):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="probe", Body=b"1")
            return
        except (BotoCoreError, ClientError) as error:
            running = server.process is not None and server.process.poll() is None
            if time.monotonic() > deadline or not running:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{server.name} did not start: {error}\n{tail}") from error
            time.sleep(0.1)


def _command(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed; install the dev extra")
    return found


@pytest.fixture(scope="session")
def seaweed_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, S3Server]]:
    """One SeaweedFS, over HTTP and over TLS."""
    folder = tmp_path_factory.mktemp("seaweed")
    data = folder / "data"
    data.mkdir()
    ca, crt, key = write_certificates(folder)
    http, https = free_port(pair_offset=10000), free_port()
    # SeaweedFS listens for gRPC on each port + 10000 as well.
    ports = {name: free_port(pair_offset=10000) for name in ("master", "filer", "volume", "admin")}
    command = [
        _command("weed"), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
        # Every bucket takes a volume of its own; by default the free disk space decides how many
        # there may be, and some seventy buckets later no put succeeds any more.
        "-volume.max=5000", "-master.volumeSizeLimitMB=64",
        f"-s3.port={http}", f"-s3.port.https={https}", f"-s3.cert.file={crt}",
        f"-s3.key.file={key}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in ports.items()),
    ]  # fmt: skip
    log = folder / "log"
    process = start(
        command,
        log,
        {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "GOMEMLIMIT": "400MiB",
        },
    )
    plain = S3Server(
        "seaweedfs", f"http://127.0.0.1:{http}", ACCESS_KEY, SECRET_KEY, process=process
    )
    tls = S3Server(
        "seaweedfs-tls", f"https://127.0.0.1:{https}", ACCESS_KEY, SECRET_KEY, str(ca), process
    )
    try:
        wait_until_it_stores(plain, log)
        wait_until_it_stores(tls, log)
        yield plain, tls
    finally:
        stop(process)


@pytest.fixture(scope="session")
def seaweed(seaweed_pair: tuple[S3Server, S3Server]) -> S3Server:
    """SeaweedFS over HTTP."""
    return seaweed_pair[0]


@pytest.fixture(scope="session")
def seaweed_tls(seaweed_pair: tuple[S3Server, S3Server]) -> S3Server:
    """The same SeaweedFS over TLS, with a certificate of a test authority."""
    return seaweed_pair[1]


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Ministack, which answers at the edges as AWS does."""
    folder = tmp_path_factory.mktemp("ministack")
    port = free_port()
    log = folder / "log"
    process = start(
        [_command("ministack")],
        log,
        {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "SERVICES": "s3",
            "AUTH": "true",
            "TMPDIR": str(folder),
        },
    )
    server = S3Server("ministack", f"http://127.0.0.1:{port}", "test", "test", process=process)
    try:
        wait_until_it_stores(server, log)
        yield server
    finally:
        stop(process)

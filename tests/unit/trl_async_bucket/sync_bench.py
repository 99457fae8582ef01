"""A ``BucketSync`` over a real folder bucket, and what is in that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter_bucket.fetch import RunReader
from adapter_bucket.manifest import Manifest
from adapter_bucket.ready_policy import ANY
from tests.unit.trl_async_bucket.models import (
    StatusServer,
    replica_status,
    train_one_step,
)
from trl_async_bucket.settings import SyncSettings
from trl_async_bucket.snapshot import lora_parameters
from trl_async_bucket.sync import BucketSync


def make_sync(
    server: StatusServer, model: Any, tmp_path: Path, ready: list[int] | None = None, **changes: Any
) -> BucketSync:
    server.base = replica_status(model)
    settings = {
        "bucket_url": f"file://{tmp_path}/bucket",
        "run_id": "run",
        "takeover": False,
        "dtype": "auto",
        "ready": ANY,
        "max_lag": 3,
        "keep_every": 0,
        "base_model": None,
        "window": 3,
        "server_url": server.url,
        "timeout_s": 20.0,
        **changes,
    }
    ready = [] if ready is None else ready
    return BucketSync(model, "default", SyncSettings(**settings), on_ready=ready.append)


def read_manifest(server: StatusServer) -> Manifest:
    assert server.store is not None
    manifest = RunReader(server.store, "run").poll()
    assert manifest is not None
    return manifest


def publish(sync: BucketSync, count: int, model: Any) -> list[int]:
    versions = []
    for step in range(count):
        version = max(sync.taken_version + 1, sync.next_version)
        sync.take(lora_parameters(model, "default"), version=version, step=step)
        sync.wait_lag(0)
        versions.append(version)
        train_one_step(model)
    return versions

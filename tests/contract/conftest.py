"""The contract suite runs over every store: ``store`` is each of them in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from adapter_bucket.file_store import FileStore
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.s3_store import S3Store
from adapter_bucket.store import Store
from tests.s3_servers import S3Server, ministack, seaweed, seaweed_pair, seaweed_tls

__all__ = ["ministack", "seaweed", "seaweed_pair", "seaweed_tls"]

settings.register_profile(
    "contract",
    max_examples=40,
    deadline=None,  # a busy machine is no fault of the code
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("contract")

S3_NAMES = ["seaweed", "seaweed_tls", "ministack"]
STORE_NAMES = ["memory", "file", *S3_NAMES]


@pytest.fixture(params=S3_NAMES)
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each real S3 server in turn."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(params=STORE_NAMES)
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same, at first empty, bucket again, as another process would."""
    if request.param == "memory":
        memory = MemoryStore()
        return lambda: memory
    if request.param == "file":
        return lambda: FileStore.open((tmp_path / "bucket").as_uri())
    server: S3Server = request.getfixturevalue(request.param)
    settings = server.settings(server.new_bucket(), prefix="some/prefix/")
    return lambda: S3Store(settings)


@pytest.fixture
def store(reopen: Callable[[], Store]) -> Store:
    """An empty bucket of each store in turn."""
    return reopen()

"""What serves the tests of a run's way into its bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_bucket.stores import open_store
from tests.unit.trl_async_bucket.models import (
    StatusServer,
    status_server,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    with status_server() as server:
        server.store = open_store(f"file://{tmp_path}/bucket")
        yield server

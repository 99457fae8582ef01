"""Fixtures of the proxy's tests: real servers and sockets on 127.0.0.1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.proxy.proxy_harness import Harness


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def harness(anyio_backend: object) -> AsyncIterator[Harness]:
    """Starts stand-in replicas and proxies; stops all of them at the end."""
    async with Harness() as started:
        yield started


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}"


@pytest.fixture
def store(bucket: str) -> Store:
    return open_store(bucket)

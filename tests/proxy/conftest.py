"""Fixtures of the proxy's tests: real servers and sockets on 127.0.0.1."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.proxy.proxy_harness import Harness


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def harness(anyio_backend: object) -> AsyncIterator[Harness]:
    """Starts stand-in replicas and proxies; stops all of them at the end."""
    async with Harness() as started:
        yield started

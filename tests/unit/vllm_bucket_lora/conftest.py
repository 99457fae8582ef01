"""Short waits, one event loop, and bounds of the property tests: the same examples in every run."""

from __future__ import annotations

import pytest
from hypothesis import settings

from vllm_bucket_lora import listing, service

settings.register_profile("plugin", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("plugin")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "DISCOVER_S", 0.02)
    monkeypatch.setattr(service, "UNPUBLISHED_WAIT_S", 0.05)

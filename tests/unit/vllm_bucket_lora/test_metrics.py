"""Figures of what is gone are dropped, or a server that runs for weeks would collect them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, Gauge, generate_latest

from vllm_bucket_lora import metrics


@pytest.fixture
def info() -> Iterator[Gauge]:
    """vLLM's own figure, as it makes it."""
    labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
    gauge = Gauge("vllm:lora_requests_info", "Running stats on lora requests.", labels)
    yield gauge
    REGISTRY.unregister(gauge)


def test_only_the_mixtures_with_the_adapter_that_is_gone_are_dropped(info: Gauge) -> None:
    for waiting, running in (("", "a-v1"), ("a-v1", "a-v2"), ("", "a-v2,a-v1"), ("", "a-v11,a-v2")):
        info.labels("8", waiting, running).set(1)
    metrics.forget_adapter("a-v1")
    left = [sample.labels["running_lora_adapters"] for m in info.collect() for sample in m.samples]
    assert left == ["a-v11,a-v2"]


def test_a_run_that_is_gone_has_no_figures() -> None:
    metrics.NEWEST_READY.labels("gone").set(3)
    metrics.NEWEST_READY.labels("stays").set(4)
    metrics.forget_run("gone")
    page = generate_latest(REGISTRY).decode()
    assert 'run="gone"' not in page
    assert 'bucket_lora_newest_ready_version{run="stays"} 4.0' in page


def test_what_several_processes_share_stays(monkeypatch: pytest.MonkeyPatch, info: Gauge) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    info.labels("8", "", "b-v1").set(1)
    metrics.NEWEST_READY.labels("shared").set(1)
    metrics.forget_adapter("b-v1")
    metrics.forget_run("shared")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    page = generate_latest(REGISTRY).decode()
    assert "b-v1" in page
    assert 'run="shared"' in page

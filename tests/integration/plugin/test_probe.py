"""Probes on a real engine: a right one passes, and nothing else becomes ready."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.probe import Probe
from adapter_bucket.status import AdapterStatus, ProbeResult, ReadyState
from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import Server
from tests.integration.plugin.test_serving import WAIT_S, assert_not_served, assert_serves_truth

pytestmark = pytest.mark.slow

TOKENS = [(7 * place) % 256 for place in range(200)]
"""Longer than a block of the prefix cache."""


def about(server: Server, name: str) -> AdapterStatus:
    found = server.status(name, wait_s=WAIT_S).adapter
    assert found is not None
    return found


def moved(probe: Probe, field: str, by: float) -> Probe:
    """The probe with one value changed."""
    values = list(getattr(probe, field))
    values[100] += by
    return probe.model_copy(update={field: values})


def test_a_true_probe_passes_also_where_its_tokens_are_in_the_prefix_cache(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("proven")
    probe = run.true_probe(1, TOKENS)
    assert probe.effect > 0.1
    server.generate(server.model, TOKENS)
    found = about(server, run.publish(1, probe=probe))
    assert (found.state, found.probe) == (ReadyState.READY, ProbeResult.PASSED), found
    assert_serves_truth(server, run, 1)
    assert about(server, run.publish(2)).probe is ProbeResult.NONE


def test_an_engine_that_computes_something_else_is_not_served_from(
    server: Server, new_run: RunMaker, bucket: Path
) -> None:
    run = new_run("disproven")
    assert about(server, run.publish(1)).state is ReadyState.READY
    others = run.true_probe(1, TOKENS)
    found = about(server, run.publish(2, probe=others))
    assert (found.state, found.probe) == (ReadyState.REFUSED, ProbeResult.FAILED)
    assert "its probe failed: with the adapter, the log-probability of token" in str(found.reason)
    assert_not_served(server, run.name(2))
    assert_serves_truth(server, run, 1)
    _wait_for_failure_in_heartbeat(bucket, run.run_id)
    assert "bucket_lora_probe_failures_total" in server.text("/metrics")
    assert server.log.read_text().count(f"{run.name(2)} is refused") == 1


def test_another_base_model_is_noticed_by_its_numbers(server: Server, new_run: RunMaker) -> None:
    run = new_run("other-numbers")
    probe = moved(run.true_probe(1, TOKENS), "base_logprobs", -0.05)
    found = about(server, run.publish(1, probe=probe))
    assert found.probe is ProbeResult.FAILED
    assert "without the adapter" in str(found.reason)
    assert "with the adapter, the" not in str(found.reason)


def test_a_probe_that_the_engine_cannot_evaluate_is_refused_with_its_reason(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("too-long")
    tokens = [1] * 256
    probe = run.true_probe(1, tokens)
    assert len(tokens) + 1 > 256, "the server's --max-model-len"
    found = about(server, run.publish(1, probe=probe))
    assert found.state is ReadyState.REFUSED
    assert "does not evaluate its probe" in str(found.reason)


def _wait_for_failure_in_heartbeat(bucket: Path, run_id: str) -> None:
    reader = HeartbeatReader(FileStore(bucket), run_id)
    deadline = time.monotonic() + WAIT_S
    while True:
        seen = [one.heartbeat.status.runs[run_id] for one in reader.poll().values()]
        if any(status.probes.get(2) is ProbeResult.FAILED for status in seen):
            return
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)

"""What one run over the bucket must show, with real vLLM, TRL and S3."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import Manifest, RunState
from adapter_bucket.store import Store
from demo.observe import requests_by_replica
from demo.processes import Child
from demo.summary import series, steps_only, summarise
from tests.integration.loop.conftest import FIRST_RUN_STEPS, RUN_ID, Fleet
from tests.integration.loop.truth import GreedyAnswer, ask_replica, ask_transformers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of a float32 logprob between vLLM and transformers."""


def read_manifest(store: Store) -> Manifest:
    manifest = RunReader(store, RUN_ID).poll()
    assert manifest is not None
    return manifest


def test_the_policy_learns_and_stays_close_to_the_sampled_one(
    first_run: list[dict[str, Any]],
) -> None:
    summary = summarise(first_run)
    assert summary.steps == FIRST_RUN_STEPS
    assert summary.reward_last >= 3 * summary.reward_first
    assert abs(summary.ratio_mean - 1) <= 0.02


def test_every_step_reports_its_sync(first_run: list[dict[str, Any]]) -> None:
    steps = steps_only(first_run)
    for name in ("bucket/snapshot_s", "bucket/version", "bucket/lag"):
        assert len(series(steps, name)) == FIRST_RUN_STEPS, name
    for name in ("bucket/publish_s", "bucket/ready_s", "bucket/bytes"):
        assert series(steps, name), name


def test_the_finished_run_says_so(
    fleet: Fleet, first_run: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(fleet.store(monkeypatch))
    assert manifest.state is RunState.FINISHED
    assert manifest.latest == FIRST_RUN_STEPS + 1  # the first sync is before the first step


def test_generation_is_never_paused_because_pausing_is_not_even_enabled(fleet: Fleet) -> None:
    for server in (*fleet.replicas.values(), fleet.proxy):
        for path in ("/pause", "/v1/load_lora_adapter", "/collective_rpc"):
            assert requests.post(f"{server.url}{path}", json={}, timeout=5).status_code in (
                403,
                404,
                405,
            ), f"{server.child.name} {path}"


def test_a_sync_blocks_the_optimizer_a_twentieth_of_stock_at_most(
    first_run: list[dict[str, Any]], stock_run: list[dict[str, Any]]
) -> None:
    # Without each run's first sync, which both must wait for: nothing can be sampled before it.
    ours = series(steps_only(first_run), "perf/weight_sync_s")[1:]
    stock = series(steps_only(stock_run), "perf/weight_sync_s")[1:]
    # The median: on two shared cores the mean of either measures the neighbours.
    assert statistics.median(ours) <= statistics.median(stock) / 20


def test_a_second_run_on_the_same_replicas_serves_exactly_its_own_weights(
    fleet: Fleet,
    first_run: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in the middle, so that a whole window of versions is ready to be compared."""
    with fleet.trainer("second", steps=100_000) as trainer:
        fleet.processes.wait_until(
            "the second run to take 12 steps",
            lambda: len(steps_only(fleet.metrics("second"))) >= 12,
            timeout_s=180,
            watch=[trainer],
        )
        trainer.process.send_signal(signal.SIGINT)
        trainer.process.wait(60)
    store = fleet.store(monkeypatch)
    manifest = read_manifest(store)
    assert manifest.state is RunState.INTERRUPTED
    assert manifest.writer.epoch == 2
    assert manifest.latest > FIRST_RUN_STEPS + 12  # numbers go on: no name is used twice

    newest = manifest.latest
    directory = fetch_version(store, RUN_ID, manifest.versions[-1], tmp_path)
    truth = ask_transformers(fleet.model, directory)
    for server in fleet.replicas.values():
        assert_equal(ask_replica(server, adapter_name(RUN_ID, newest), fleet.model), truth)


def test_three_versions_are_served_exactly_on_every_replica_while_training_goes_on(
    fleet: Fleet,
    first_run: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also: a replica killed in the middle costs nothing, and catches up by itself."""
    with fleet.trainer("third", steps=100_000) as trainer:
        check_while_it_trains(fleet, trainer, fleet.store(monkeypatch), tmp_path)
        trainer.process.send_signal(signal.SIGINT)
        trainer.process.wait(60)
    ratios = series(steps_only(fleet.metrics("third")), "ratio")
    assert abs(statistics.fmean(ratios) - 1) <= 0.02


def check_while_it_trains(fleet: Fleet, trainer: Child, store: Store, folder: Path) -> None:
    """Three versions, then a replica that is killed and comes back."""

    def steps() -> int:
        return len(steps_only(fleet.metrics("third")))

    def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 180) -> None:
        fleet.processes.wait_until(what, condition, timeout_s=timeout_s, watch=[trainer])

    wait_for("the third run to take 10 steps", lambda: steps() >= 10)
    check_three_versions(fleet, store, folder)

    victim = fleet.replicas["replica-2"]
    port = int(victim.url.rpartition(":")[2])
    victim.child.kill()
    at_kill = steps()
    wait_for("ten more steps without replica-2", lambda: steps() >= at_kill + 10)

    sent_before = requests_by_replica(fleet.proxy)[victim.url]
    fleet.replicas["replica-2"] = fleet.start_replica("replica-2-again", port=port)
    wait_for("the restarted replica to be healthy", fleet.replicas["replica-2"].healthy)
    wait_for(
        "the restarted replica to get requests",
        lambda: requests_by_replica(fleet.proxy)[victim.url] >= sent_before + 20,
    )
    status = fleet.replicas["replica-2"].status()
    assert status is not None
    assert status.ready
    assert not status.error


def check_three_versions(fleet: Fleet, store: Store, folder: Path) -> None:
    """Compare three versions while they are in the window; the window moves meanwhile."""
    checked: set[int] = set()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        entry = read_manifest(store).versions[-1]
        if entry.version in checked:
            time.sleep(0.2)  # a check may be faster than a step
            continue
        directory = fetch_version(store, RUN_ID, entry, folder)
        name = adapter_name(RUN_ID, entry.version)
        answers = [ask_replica(server, name, fleet.model) for server in fleet.replicas.values()]
        truth = ask_transformers(fleet.model, directory)
        for answer in answers:
            assert_equal(answer, truth)
        checked.add(entry.version)
        if len(checked) == 3:
            return
    raise AssertionError(f"only versions {checked} could be compared")


def assert_equal(answer: GreedyAnswer, truth: GreedyAnswer) -> None:
    assert answer.tokens == truth.tokens
    differences = [abs(a - b) for a, b in zip(answer.logprobs, truth.logprobs, strict=True)]
    assert max(differences) <= LOGPROB_TOLERANCE

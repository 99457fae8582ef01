"""``GRPOTrainer(weight_sync="bucket")`` against a real replica: on-policy, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.manifest import Manifest, RunState
from tests.integration.trainers.conftest import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6


class Run:
    """A finished run: what the trainer logged, and which version answered at which step."""

    def __init__(self, out: Path, manifest: Manifest) -> None:
        lines = (out / "generations.jsonl").read_text().splitlines()
        self.generations: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.log: list[dict[str, Any]] = json.loads((out / "log.json").read_text())
        self.manifest = manifest


@pytest.fixture(scope="module")
def run(place: Place) -> Run:
    module = "tests.integration.trainers.train_grpo"
    return Run(place.train(module, "grpo", "--steps", str(STEPS)), place.manifest("grpo"))


def test_every_completion_of_a_step_came_from_the_version_of_that_step(run: Run) -> None:
    step_of: dict[int, int] = {}
    for row in run.generations:
        parsed = parse_adapter_name(row["model"])
        assert parsed is not None
        assert parsed[0] == "grpo"
        assert step_of.setdefault(parsed[1], row["step"]) == row["step"]
    assert sorted(step_of.values()) == list(range(STEPS + 1))
    assert list(step_of) == sorted(step_of)
    published = {entry.version: entry.step for entry in run.manifest.versions}
    for version in published.keys() & step_of.keys():
        assert published[version] == step_of[version]
    assert sum(row["completions"] for row in run.generations) >= STEPS * 16


def test_the_sampled_policy_is_the_trained_one(run: Run) -> None:
    rows = [row for row in run.log if "sampling/importance_sampling_ratio/mean" in row]
    assert len(rows) >= STEPS
    for row in rows:
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.02)


def test_the_run_ends_with_the_last_policy_and_an_evaluation_of_it_publishes_nothing_new(
    run: Run,
) -> None:
    assert run.manifest.state is RunState.FINISHED
    assert run.manifest.latest == STEPS + 1
    assert run.manifest.versions[-1].step == STEPS
    assert "eval_reward" in run.log[-1]


def test_syncs_are_in_the_trainers_log(run: Run) -> None:
    rows = [row for row in run.log if "bucket/version" in row]
    versions = [row["bucket/version"] for row in rows]
    assert versions == sorted(versions)
    assert all(row["bucket/lag"] == 0 for row in rows)
    assert any("bucket/ready_s" in row for row in rows)

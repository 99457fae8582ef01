"""Both GRPO trainers in two processes (DDP over gloo): one version a sync, by rank 0."""

from __future__ import annotations

import json

import pytest

from adapter_bucket.manifest import RunState
from demo.observe import read_metrics
from demo.summary import series, steps_only
from tests.integration.trainers.conftest import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4


def test_asynchronous_grpo(place: Place) -> None:
    out = place.train("demo.train", "async-2", "--steps", str(STEPS), ranks=2)
    steps = steps_only(read_metrics(out / "metrics.jsonl"))
    versions = series(steps, "bucket/version")
    assert versions == [version + 2 for version in range(STEPS)]  # the first before any step
    assert all(abs(ratio - 1) <= 0.05 for ratio in series(steps, "ratio"))
    manifest = place.manifest("async-2")
    assert manifest.state is RunState.FINISHED
    assert (manifest.latest, manifest.versions[-1].step) == (STEPS + 1, STEPS)


def test_on_policy_grpo(place: Place) -> None:
    module = "tests.integration.trainers.train_grpo"
    out = place.train(module, "grpo-2", "--steps", "2", ranks=2)
    rows = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert {row["model"] for row in rows} == {"grpo-2-v1", "grpo-2-v2", "grpo-2-v3"}
    assert place.manifest("grpo-2").versions[-1].step == 2

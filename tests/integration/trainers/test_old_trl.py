"""Older TRL releases train over the bucket as the newest one does.

``TRL_RELEASES=1.14.2,1.15.0,1.16.0`` runs the whole matrix (``make trl-matrix``); by default only
the oldest is run, beside the installed newest one that all other tests use.
"""

from __future__ import annotations

import json
import os
import statistics

import pytest

from adapter_bucket.manifest import RunState
from tests.integration.trainers.conftest import Place
from tests.old_trl import overlay
from trl_async_bucket.compat.seam import TESTED_TRL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RELEASES = os.environ.get("TRL_RELEASES", TESTED_TRL[0]).split(",")
STEPS = 10


@pytest.mark.parametrize("release", RELEASES)
def test_asynchronous_grpo(place: Place, release: str) -> None:
    name = f"async-{release}"
    out = place.train("demo.train", name, "--steps", str(STEPS), trl=overlay(release))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    assert len(ratios) == STEPS
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.02)
    manifest = place.manifest(name)
    assert manifest.state is RunState.FINISHED
    assert manifest.versions[-1].step == STEPS


@pytest.mark.parametrize("release", RELEASES)
def test_on_policy_grpo(place: Place, release: str) -> None:
    name = f"grpo-{release}"
    module = "tests.integration.trainers.train_grpo"
    out = place.train(module, name, "--steps", "2", trl=overlay(release))
    log = json.loads((out / "log.json").read_text())
    ratios = [
        row[key] for row in log for key in row if key.endswith("importance_sampling_ratio/mean")
    ]
    assert ratios
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.02)
    assert place.manifest(name).versions[-1].step == 2

"""Adapters that somebody put into the bucket by hand: none is served, and each is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.signing import SigningKeys
from adapter_bucket.status import AdapterStatus, ReadyState
from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.runs import TestRun, cut, flipped
from tests.integration.plugin.server import Server, wait_until
from tests.integration.plugin.test_serving import WAIT_S, assert_not_served, assert_serves_truth
from tests.integration.plugin.tiny_model import make_adapter

pytestmark = pytest.mark.slow


def renamed(weights: bytes) -> bytes:
    """One layer has a name that the model does not know."""
    tensors = load(weights).items()
    return bytes(save({name.replace(".layers.1.", ".decoder.1."): t for name, t in tensors}))


def without_effect(weights: bytes) -> bytes:
    tensors = load(weights).items()
    return bytes(save({name: 0 * t if "lora_B" in name else t for name, t in tensors}))


def put_bad(run: TestRun, base: Path, version: int, kind: str) -> str:
    """Publish a version that is bad in one way; return its model name."""
    weights, _ = make_adapter(base, version)
    match kind:
        case "corrupt":
            return run.publish_damaged(version, flipped)
        case "truncated":
            return run.publish_damaged(version, cut)
        case "of another rank":
            return run.publish(version, weights=make_adapter(base, version, rank=8)[0])
        case "of other modules":
            return run.publish(version, weights=renamed(weights))
        case _:
            return run.publish(version, weights=without_effect(weights))


REASONS = {
    "corrupt": "sha256",
    "truncated": "bytes",
    "of another rank": "for rank 4",
    "of other modules": "the served model has no module model.decoder.1.mlp.down_proj",
    "without effect": "every lora_B is zero",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_bad_version_is_told_once_and_good_ones_stay(
    server: Server, new_run: RunMaker, base: Path, kind: str
) -> None:
    run = new_run("by-hand-" + kind.replace(" ", "-"))
    server.status(run.publish(1), wait_s=WAIT_S)
    name = put_bad(run, base, 2, kind)
    about = server.status(name, wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED, about
    assert REASONS[kind] in str(about.reason)
    assert about.retried is (kind in ("corrupt", "truncated"))
    assert REASONS[kind] in assert_not_served(server, name)
    assert server.status().runs[run.run_id].ready == [1]
    assert_serves_truth(server, run, 1)
    told = [line for line in server.log.read_text().splitlines() if f"{name} is " in line]
    assert len(told) == 1
    assert REASONS[kind] in told[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 128}, "--max-lora-rank 128"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"config": {"use_dora": True}}, "use_dora"),
        ({"config": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"config": {"bias": "all"}}, "bias"),
        ({"config": {"target_modules": ".*_proj"}}, "target_modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_with_the_value_to_change(
    server: Server, new_run: RunMaker, change: dict[str, Any], named: str
) -> None:
    run = new_run("refused-" + "-".join(str(named).strip("-").split()).replace("_", "-"))
    name = run.publish(1, **change)
    about = server.status(name, wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert named in str(about.reason)
    assert_not_served(server, name)


def test_a_run_on_another_base_model_is_refused(server: Server, new_run: RunMaker) -> None:
    run = new_run("other-base", base_model=BaseModelRef(id="org/another-model"))
    about = server.status(run.publish(1), wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert "org/another-model" in assert_not_served(server, run.name(1))
    assert server.log.read_text().count("run other-base: ") == 1


def test_a_run_that_nobody_with_a_key_signed_is_not_believed(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("unsigned", signing=SigningKeys())
    forged = new_run("forged", signing=SigningKeys.parse(f"tests:{'00' * 32}"))
    for suspect, reason in ((run, "is not signed"), (forged, "signature")):
        name = suspect.publish(1)
        wait_until(lambda name=name, why=reason: why in str(_about(server, name).reason))
        assert _about(server, name).state is not ReadyState.READY
        assert server.log.read_text().count(f"run {suspect.run_id}: ") == 1


def _about(server: Server, name: str) -> AdapterStatus:
    about = server.status(name, wait_s=0.5).adapter
    assert about is not None
    return about

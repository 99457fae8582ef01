"""Two real processes under each kind of parallelism: what reaches the bucket is what PEFT saves.

All over gloo on CPUs, with the real DeepSpeed and bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.parallel.conftest import Runs
from tests.integration.parallel.setups import SETUPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

LINEAR_LAYERS = 14
"""Two decoder layers of seven; each has two factors."""

STATUS = {"allreduce_": 1}
"""What ``all_ranks`` costs."""

GATHERED = {"gather_": 1, **STATUS}

MODELS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPPeftModel",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}


@pytest.mark.parametrize("name", SETUPS)
def test_each_version_is_what_peft_saves_of_that_step(runs: Runs, name: str) -> None:
    for step in runs.report(name)["steps"]:
        assert step == {
            "tensors": 2 * LINEAR_LAYERS,
            "same_names": True,
            "differing": [],
            "changed_b": LINEAR_LAYERS,
        }


@pytest.mark.parametrize("name", SETUPS)
def test_a_sync_gathers_once_at_most(runs: Runs, name: str) -> None:
    first, *later = runs.report(name)["collectives"]
    assert first["broadcast_"] == 2  # the dtype, once
    sharded = SETUPS[name].fsdp or SETUPS[name].zero == 3
    assert later == [GATHERED if sharded else STATUS] * len(later)


@pytest.mark.parametrize("name", SETUPS)
def test_a_probe_is_what_one_process_computes_with_these_weights(runs: Runs, name: str) -> None:
    assert runs.report(name)["probe_difference"] < 1e-4


@pytest.mark.parametrize("name", SETUPS)
def test_the_setup_is_what_its_name_says(runs: Runs, name: str) -> None:
    setup, report = SETUPS[name], runs.report(name)
    assert report["model"] == MODELS[name.removeprefix("qlora-").partition("-")[0]]
    base = report["base"]
    assert base["elements"] == elements_of_a_base_weight(name)
    assert base["dtype"] == f"torch.{setup.quantise or 'float32'}"


def elements_of_a_base_weight(name: str) -> Any:
    """On one of two ranks."""
    setup = SETUPS[name]
    whole = 135 * 63
    if setup.quantise:  # two 4-bit weights in a byte, eight in a float
        whole = 136 * 64 // (2 if setup.quantise == "uint8" else 8)
    if setup.zero == 3:
        return -(-whole // 2)
    # accelerate leaves bytes whole on every rank; FSDP2 cuts rows.
    if not setup.fsdp or setup.quantise == "uint8":
        return whole
    return whole // 2 if setup.quantise else 68 * 63

"""What replicas are refused for, and what is only told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import ConfigError
from adapter_bucket.status import ReplicaStatus
from tests.unit.trl_async_bucket.models import tiny_peft_model
from trl_async_bucket.checks import (
    check_quantization,
    check_replicas,
    check_trained,
    rounding_notes,
)
from trl_async_bucket.fleet import quantization_method


def replica(**changes: Any) -> dict[str, ReplicaStatus]:
    settings = {
        "replica_id": "r1", "base_model": "m", "dtype": "bfloat16", "max_loras": 8,
        "max_lora_rank": 8, **changes,
    }  # fmt: skip
    return {"http://r1": ReplicaStatus(**settings)}


@pytest.mark.parametrize(
    ("trained", "served", "told"),
    [
        ("bitsandbytes", "none", "as it is"),
        ("gptq", "none", "as it is"),
        ("bitsandbytes", "fp8", "as fp8"),
    ],
)
def test_an_adapter_of_a_quantised_base_is_not_served_on_another_one(
    trained: str, served: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{trained}.*http://r1 .*{told}.*--quantization"):
        check_quantization(replica(quantization=served), trained)


@pytest.mark.parametrize(
    ("trained", "served", "differ"),
    [
        (40 * "a", 40 * "b", True),
        ("v1.0", "v2.0", True),
        (40 * "a", 40 * "a", False),
        (40 * "a", "main", False),  # the branch may be at this commit
        (40 * "a", None, False),
    ],
)
def test_another_revision_of_the_base_model_is_refused(
    trained: str, served: str | None, differ: bool
) -> None:
    replicas = replica(base_model="org/m", revision=served)
    base = BaseModelRef(id="org/m", revision=trained)
    if not differ:
        check_replicas(replicas, base_model=base, rank=8, window=2)
        return
    with pytest.raises(ConfigError, match=rf"http://r1: .*revision '{trained}' .*'{served}'"):
        check_replicas(replicas, base_model=base, rank=8, window=2)


@pytest.mark.parametrize(
    ("trained", "served"),
    [("bitsandbytes", "bitsandbytes"), ("bitsandbytes", ""), ("gptq", "gptq_marlin")],
)
def test_the_same_quantization_or_an_unknown_one_is_accepted(trained: str, served: str) -> None:
    check_quantization(replica(quantization=served), trained)


def test_a_whole_base_may_be_served_in_any_way() -> None:
    check_quantization(replica(quantization="fp8"), None)


def test_rounding_is_told_and_not_refused() -> None:
    notes = rounding_notes(replica(), trained="float32", published="float16")
    assert len(notes) == 2
    assert "--dtype float32" in notes[0]
    assert "casts them to bfloat16" in notes[1]
    assert rounding_notes(replica(), trained="bfloat16", published="bfloat16") == []


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (None, None),
        ({"quant_method": "gptq"}, "gptq"),
        (SimpleNamespace(quant_method=SimpleNamespace(value="bitsandbytes")), "bitsandbytes"),
        ({}, "unknown"),
    ],
)
def test_the_quantization_is_read_from_the_models_config(config: Any, method: str | None) -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=config))
    assert quantization_method(model) == method


def test_weights_that_are_trained_besides_the_adapter_are_refused() -> None:
    model = tiny_peft_model()
    check_trained(model, "default")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 weights besides.*model\.norm\.weight.*Freeze"):
        check_trained(model, "default")


def test_a_factor_of_several_modules_is_refused() -> None:
    model = tiny_peft_model()
    layers = model.base_model.model.model.layers
    layers[1].mlp = layers[0].mlp
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj.*share their weights"):
        check_trained(model, "default")

"""What a probe must leave as it was: what is trained, on one process and sharded over several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.trl_async_bucket.models import tiny_peft_model
from tests.unit.trl_async_bucket.rank_processes import as_ranks
from trl_async_bucket.probe_maker import ProbeMaker


def trained(model: Any) -> list[str]:
    """Names of the factors that get a gradient from a step."""
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.square().mean().backward()
    return [name for name, p in model.named_parameters() if p.grad is not None]


def trained_after_a_probe(where: str, reshard: bool | None) -> tuple[list[str], list[str]]:
    """Before and after, of an FSDP2 model that is cut by layers or as one."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_peft_model()
    if where == "layers":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    before = trained(model)
    model.zero_grad()
    ProbeMaker([1, 2, 3], dtype="float32").make(model)
    trained(model)  # a module that was left unsharded is cut again behind this step only
    model.zero_grad()
    return before, trained(model)


@pytest.mark.parametrize(
    ("where", "reshard"), [("layers", True), ("layers", False), ("root", None)]
)
def test_a_sharded_model_is_trained_on_after_a_probe(where: str, reshard: bool) -> None:
    for before, after in as_ranks(2, trained_after_a_probe, where, reshard):
        assert len(before) == 8
        assert after == before


def test_what_was_frozen_stays_frozen() -> None:
    """As in LoRA-FA: PEFT makes every factor trainable again when an adapter is enabled."""
    model = tiny_peft_model()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    before = trained(model)
    model.zero_grad()
    ProbeMaker([1, 2, 3], dtype="float32").make(model)
    assert trained(model) == before
    assert all("lora_B" in name for name in before)

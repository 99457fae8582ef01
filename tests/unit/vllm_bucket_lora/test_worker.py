"""The module check of the worker side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_bucket_lora import worker

MANAGER = SimpleNamespace(
    modules={
        "model.layers.0.self_attn.qkv_proj": object(),
        "model.layers.0.mlp.down_proj": object(),
    },
    packed_modules={
        "model.layers.0.self_attn.qkv_proj": [
            f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
        ]
    },
)


def test_parts_of_a_packed_module_are_known() -> None:
    worker.check_modules(
        ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"], MANAGER
    )


def test_a_module_under_another_prefix_is_named() -> None:
    with pytest.raises(ValueError, match=r"no module decoder\.layers\.0\.self_attn\.q_proj;"):
        worker.check_modules(["decoder.layers.0.self_attn.q_proj"], MANAGER)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(ValueError, match="and 7 more"):
        worker.check_modules([f"layers.{i}.q_proj" for i in range(10)], MANAGER)


def test_a_rank_of_a_pipeline_checks_its_own_layers_only() -> None:
    others = ("model.layers.1.",)
    worker.check_modules(["model.layers.1.mlp.down_proj"], MANAGER, elsewhere=others)
    with pytest.raises(ValueError, match=r"no module model\.blocks\.1\.mlp\.down_proj;"):
        worker.check_modules(["model.blocks.1.mlp.down_proj"], MANAGER, elsewhere=others)
    with pytest.raises(ValueError, match=r"no module model\.layers\.10\.mlp\.down_proj;"):
        worker.check_modules(["model.layers.10.mlp.down_proj"], MANAGER, elsewhere=others)

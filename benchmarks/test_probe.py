"""What a probe costs the trainer: one forward pass of 32 tokens, two at a run's first sync.

``python -m pytest benchmarks/test_probe.py --benchmark-only``. The model has the shape of
Qwen2.5-0.5B with a smaller vocabulary, in float32, with a rank-16 adapter on all linear layers.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(Qwen2ForCausalLM(config), lora)


def test_probe(benchmark: Any, model: Any) -> None:
    from trl_async_bucket.probe_maker import ProbeMaker, probe_tokens

    maker = ProbeMaker(probe_tokens(None, 32_000), dtype="float32")
    maker.make(model)  # the base model's own values, once a run
    probe = benchmark.pedantic(maker.make, args=(model,), rounds=5, iterations=1)
    assert len(probe.logprobs) == len(probe.token_ids) - 1

"""How long does a snapshot keep the optimizer waiting, beside PEFT's `save_pretrained`?

`make bench BENCH_ARGS=benchmarks/test_snapshot.py`. The adapter has the tensors of an all-linear
LoRA on Qwen2.5-1.5B (28 layers, 392 tensors); only they are built, not the base model's weights.
One thread for both contenders: on a busy machine torch's thread pool waits for its slowest thread
at each of the 392 copies, which measures the neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_async_bucket.snapshot import SnapshotBuffer, lora_parameters

LAYERS, HIDDEN, INTERMEDIATE, KV = 28, 1536, 8960, 256
RANKS = [1, 16, 64]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peft_model(rank: int) -> Any:
    """A PEFT model whose base weights take no memory."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS, num_attention_heads=12, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        base = Qwen2ForCausalLM(config)
    model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                real = torch.nn.Parameter(torch.randn(parameter.shape) * 0.01)
                setattr(module, name, real)
    return model


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.benchmark(group="snapshot")
def test_ours(benchmark: Any, rank: int) -> None:
    parameters = lora_parameters(peft_model(rank), "default")
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    buffer = SnapshotBuffer(shapes, dtype=torch.bfloat16, pin_memory=False)
    benchmark.pedantic(buffer.fill, (parameters,), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.benchmark(group="snapshot")
def test_peft_save_pretrained(benchmark: Any, rank: int, tmp_path: Path) -> None:
    model = peft_model(rank)
    parameters = {name: p.detach() for name, p in model.state_dict().items() if ".lora_" in name}
    benchmark.pedantic(
        model.save_pretrained,
        (tmp_path,),
        {"state_dict": parameters, "save_embedding_layers": False},
        rounds=3,
        warmup_rounds=1,
    )

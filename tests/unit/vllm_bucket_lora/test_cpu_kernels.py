"""The CPU kernels of the installed vLLM, as they are and with the fault masked."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports vLLM


def shrunk(shrink: Any) -> Any:
    """What is left of two tokens, with slot 0 and without adapter, after the first LoRA factor."""
    import torch

    slots = torch.ones(3, 1, 4, 8)  # [slots, 1, rank, width]
    left = torch.zeros(2, 4)
    shrink(torch.ones(2, 8), slots, left, torch.tensor([0, -1]), 0.5)
    return left


def test_a_token_without_adapter_is_left_alone() -> None:
    from vllm.lora.ops.torch_ops import lora_ops

    from vllm_bucket_lora.cpu_kernels import masking

    left = shrunk(masking(lora_ops.bgmv_shrink))
    assert left[0].tolist() == [4.0] * 4
    assert left[1].tolist() == [0.0] * 4


def test_vllm_still_needs_it() -> None:
    from vllm.lora.ops.torch_ops import lora_ops

    original = getattr(lora_ops.bgmv_shrink, "__wrapped__", lora_ops.bgmv_shrink)
    assert shrunk(original)[1].any(), "vLLM masks tokens without adapter now: drop cpu_kernels"


def test_prefill_and_decoding_both_go_through_it() -> None:
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from vllm_bucket_lora.cpu_kernels import install

    before = lora_ops.bgmv_shrink
    try:
        install()
        install()
        assert shrunk(punica_cpu.bgmv_shrink)[1].tolist() == [0.0] * 4
        left = torch.zeros(2, 4)
        lora_ops.sgmv_shrink(
            torch.ones(2, 8), torch.ones(3, 1, 4, 8), left, torch.tensor([0, 1]),
            torch.tensor([1, 1]), torch.tensor([0, -1]), 2, 1, 2, 0.5,
        )  # fmt: skip
        assert left[1].tolist() == [0.0] * 4
    finally:
        lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = before

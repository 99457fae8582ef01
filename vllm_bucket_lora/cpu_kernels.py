"""A fault of vLLM's CPU build: requests for the base model are computed with an adapter.

Its LoRA kernels pick each token's adapter by slot number, and a token without adapter has number
-1, which in torch is the last slot. As soon as that slot is filled, the base model answers with
somebody's adapter: wrong weights under a name, and a probe that compares with the base model fails.
The kernels of GPUs skip such tokens.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Let tokens without adapter pass the CPU kernels unchanged. Idempotent; CPU platform only.

    To be removed once ``vllm.lora.ops.torch_ops`` masks negative slot numbers; 0.32 does not.
    A test fails when that day has come.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    original = lora_ops.bgmv_shrink
    if getattr(original, "_bucket_lora", False):
        return
    # Both names: prefill comes through the first module's, decoding through the second's. With
    # nothing left of such a token after the first factor, the second one adds nothing.
    masked = masking(original)
    lora_ops.bgmv_shrink = masked
    punica_cpu.bgmv_shrink = masked


def masking(shrink: Any) -> Any:
    """Wrap ``bgmv_shrink`` so that rows with a negative slot number become zero."""

    @functools.wraps(shrink)
    def bgmv_shrink(
        inputs: Any, lora_b_weights: Any, output_tensor: Any, lora_indices_tensor: Any,
        scaling: float = 1.0,
    ) -> None:  # fmt: skip
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor.masked_fill_((lora_indices_tensor < 0)[:, None], 0)

    bgmv_shrink._bucket_lora = True  # type: ignore[attr-defined]
    return bgmv_shrink

"""Attention for TRL's packed batches where the FlashAttention-3 kernel cannot be downloaded.

TRL takes ``flash_attn_varlen_func`` from the Hub. On a GPU this uses the FlashAttention kernel that
torch brings along; on a CPU the demo's replacement. All contenders of a benchmark get the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from demo.cpu_trl import make_trl_run_on_cpu, varlen_attention


def install() -> None:
    """Give TRL the attention of this machine."""
    import torch
    from trl.experimental.async_grpo import packing

    make_trl_run_on_cpu()
    if torch.cuda.is_available():
        check("cuda")
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=torch_varlen)


def torch_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Any:
    """``flash_attn_varlen_func`` on torch's own kernel, whose gradient torch knows."""
    import torch

    if not causal or window_size != (-1, -1):
        raise NotImplementedError("causal attention without a sliding window only")
    groups = query.shape[1] // key.shape[1]
    return torch.ops.aten._flash_attention_forward(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        0.0,
        True,
        False,
        scale=softmax_scale,
    )[0]


def check(device: str) -> None:
    """Compare with plain attention, output and gradient, queries shorter than keys included.

    Raises:
        RuntimeError: they differ by more than bfloat16 explains.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    starts_q, starts_k = [0, 7, 40], [0, 23, 56]
    shapes = ((40, 4, 64), (56, 2, 64), (56, 2, 64))
    results = []
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    # The reference runs on the CPU, where the demo's tests hold it against a definition.
    ways: tuple[tuple[Any, str, Any], ...] = (
        (varlen_attention, "cpu", torch.float32),
        (torch_varlen, device, torch.bfloat16),
    )
    for call, where, dtype in ways:
        inputs = [t.clone().to(where, dtype).requires_grad_() for t in tensors]
        bounds = [torch.tensor(s, dtype=torch.int32, device=where) for s in (starts_q, starts_k)]
        kind = {"softmax_scale": None, "causal": True, "window_size": (-1, -1)}
        output = call(*inputs, *bounds, 33, 33, **kind)
        output.float().pow(2).sum().backward()
        results.append([output.detach(), *(t.grad for t in inputs)])
    for reference, ours in zip(*results, strict=True):
        error = (ours.cpu().float() - reference).norm() / reference.norm()
        if not error < 0.02:
            raise RuntimeError(f"torch's attention kernel is off by {error:.3f}")

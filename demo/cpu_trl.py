"""Replacements that let TRL's trainers train on a CPU.

For the demo and the tests only; on a CUDA machine nothing is replaced. TRL asks for a CUDA device
name and for the FlashAttention-3 kernel from the Hub; both can go when TRL gains a CPU path. From
TRL 1.16 on, its packed attention calls that kernel: the one here computes the same function,
segment by segment. Before, it was an attention implementation of transformers: torch's own takes
its place, which keeps packed sequences apart by their position ids. TRL 1.15 alone has a Triton
kernel without a CPU path for the log-probabilities; plain torch computes them instead.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any


def make_trl_run_on_cpu() -> None:
    """Install what the installed TRL needs, unless CUDA is there. Idempotent."""
    import torch
    from trl.experimental.async_grpo import async_grpo_trainer

    if torch.cuda.is_available():
        return
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    if find_spec("trl.experimental.async_grpo.packing") is not None:
        from trl.experimental.async_grpo import packing

        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    else:
        from trl.trainer.utils import create_model_from_path

        async_grpo_trainer.create_model_from_path = lambda *args, **kwargs: create_model_from_path(
            *args, **{**kwargs, "attn_implementation": "sdpa"}
        )
    if find_spec("trl.kernels.chunked_logprob") is not None:
        from trl.kernels import chunked_logprob
        from trl.trainer import utils

        if not hasattr(chunked_logprob, "_use_triton"):
            utils._ChunkedLogProbFunction = SimpleNamespace(apply=log_probs_and_entropy)


def log_probs_and_entropy(
    hidden: Any,
    weight: Any,
    bias: Any,
    targets: Any,
    temperature: float,
    _chunk_size: int,
    softcap: float | None,
    logit_scale: float,
    _outputs: tuple[str, ...],
) -> tuple[Any, Any, None, None, None]:
    """What TRL 1.15's fused kernel gives, with all logits at once.

    Args:
        hidden: ``[tokens, width]``.
        weight: ``[vocabulary, width]`` of the head, ``bias`` ``[vocabulary]`` or ``None``.
        targets: ``[tokens]``, the ids that are scored.
        temperature: The logits are divided by it.
        softcap: Must be ``None``.
        logit_scale: The logits are multiplied by it.

    Returns:
        Log-probabilities and entropies, ``[tokens]`` each, and nothing for the other outputs.
    """
    import torch

    if softcap is not None:
        raise NotImplementedError("the demo's head has no soft-capped logits")
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale / temperature
    scores = logits.log_softmax(dim=-1)
    entropy = -(scores.exp() * scores).sum(dim=-1)
    return scores.gather(1, targets[:, None])[:, 0], entropy, None, None, None


def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    _max_seqlen_q: int,
    _max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Any:
    """Attention of packed segments, as flash-attn's ``flash_attn_varlen_func`` defines it.

    Args:
        query: ``[total_q, heads, head_dim]``.
        key: ``[total_k, kv_heads, head_dim]``; value likewise.
        cu_seqlens_q: Segment boundaries in ``query``, ``[segments + 1]``; k likewise.
        softmax_scale: Scale of the logits; ``None`` is ``head_dim ** -0.5``.
        causal: Must be true: query ``i`` of a segment sees keys up to ``i + len_k - len_q``.
        window_size: Must be ``(-1, -1)``: no sliding window.

    Returns:
        ``[total_q, heads, head_dim]``.
    """
    import torch

    if not causal or window_size != (-1, -1):
        raise NotImplementedError("the demo's attention is causal and has no sliding window")
    groups = query.shape[1] // key.shape[1]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outputs = []
    for segment in range(len(starts_q) - 1):
        q = query[starts_q[segment] : starts_q[segment + 1]].transpose(0, 1)
        keys = slice(starts_k[segment], starts_k[segment + 1])
        k = key[keys].transpose(0, 1).repeat_interleave(groups, dim=0)
        v = value[keys].transpose(0, 1).repeat_interleave(groups, dim=0)
        # Bottom-right aligned: the last query sees the last key.
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale
            ).transpose(0, 1)
        )
    return torch.cat(outputs)

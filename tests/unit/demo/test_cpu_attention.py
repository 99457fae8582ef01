from __future__ import annotations

import pytest
import torch

from demo.cpu_trl import varlen_attention


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One segment and head, written out: row i sees keys up to i + len_k - len_q."""
    scores = (q @ k.T) * q.shape[-1] ** -0.5
    for row in range(q.shape[0]):
        scores[row, row + k.shape[0] - q.shape[0] + 1 :] = float("-inf")
    return scores.softmax(-1) @ v


def test_packed_segments_attend_as_flash_attention_defines_it() -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 8
    lengths = [(3, 3), (2, 5), (1, 6)]
    query = torch.randn(sum(q for q, _ in lengths), heads, dim)
    key = torch.randn(sum(k for _, k in lengths), kv_heads, dim)
    value = torch.randn_like(key)
    starts_q = torch.tensor([0, 3, 5, 6])
    starts_k = torch.tensor([0, 3, 8, 14])
    ours = varlen_attention(
        query, key, value, starts_q, starts_k, 3, 6,
        softmax_scale=None, causal=True, window_size=(-1, -1),
    )  # fmt: skip
    for segment in range(3):
        qs = slice(int(starts_q[segment]), int(starts_q[segment + 1]))
        ks = slice(int(starts_k[segment]), int(starts_k[segment + 1]))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            expected = reference(query[qs, head], key[ks, kv], value[ks, kv])
            torch.testing.assert_close(ours[qs, head], expected)


def test_what_it_does_not_compute_is_refused() -> None:
    x = torch.zeros(1, 1, 8)
    ends = torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="sliding window"):
        varlen_attention(
            x, x, x, ends, ends, 1, 1, softmax_scale=None, causal=True, window_size=(4, 0)
        )

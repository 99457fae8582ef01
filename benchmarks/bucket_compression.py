"""Whether compressing adapters pays: trained and random LoRA factors, in the serving dtypes.

``python benchmarks/bucket_compression.py`` needs torch and zstandard; nothing else here does. The
trained adapter is rank 16 on a small transformer that learns to copy, 200 steps of AdamW.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import zstandard  # type: ignore[import-not-found, unused-ignore]

RANK, WIDTH, LAYERS, STEPS = 16, 512, 4, 200


class LoraLinear(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A frozen linear layer with trained factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.b = torch.nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = x @ self.a.T @ self.b.T
        base: torch.Tensor = self.base(x)
        return base + 2 * update


def trained() -> list[torch.Tensor]:
    """Factors after real optimizer steps."""
    torch.manual_seed(0)
    layers = [LoraLinear() for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    target = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(factors, lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH)
        loss = torch.nn.functional.mse_loss(model(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [factor.detach() for factor in factors]


def gaussian() -> list[torch.Tensor]:
    """As many random numbers, at the scale of a trained adapter."""
    torch.manual_seed(1)
    return [0.02 * torch.randn_like(factor) for factor in trained()]


def as_bytes(tensors: list[torch.Tensor], dtype: torch.dtype) -> bytes:
    """The tensors' bytes as they travel."""
    return b"".join(
        bytes(tensor.to(dtype).contiguous().view(torch.uint8).numpy()) for tensor in tensors
    )


def split_bytes(data: bytes, size: int) -> bytes:
    """High bytes first, then the low ones: signs and exponents together."""
    return b"".join(data[at::size] for at in reversed(range(size)))


def measure(name: str, data: bytes, size: int) -> None:
    """Print one row."""
    cells: list[Any] = [name, f"{len(data) / 1e6:.2f} MB"]
    for level in (3, 10):
        for payload in (data, split_bytes(data, size)):
            started = time.process_time()
            packed = zstandard.ZstdCompressor(level=level).compress(payload)
            took = time.process_time() - started
            cells.append(f"{len(packed) / len(data):.1%}, {len(data) / 1e6 / took:.0f} MB/s")
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| adapter | size | zstd 3 | zstd 3, bytes split | zstd 10 | zstd 10, bytes split |")
    print("|---|---|---|---|---|---|")
    for kind, tensors in (("trained", trained()), ("gaussian", gaussian())):
        measure(f"{kind} bfloat16", as_bytes(tensors, torch.bfloat16), 2)
        measure(f"{kind} float32", as_bytes(tensors, torch.float32), 4)

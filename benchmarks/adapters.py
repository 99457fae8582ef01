"""Adapter files of the sizes that matter, without torch: all-linear LoRA on Qwen2.5's shapes.

Speed depends on sizes and on the number of tensors, so the values are random: finite, not zero,
and of no use.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import QWEN

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Adapter:
    """One version after another of an adapter of one size, in bfloat16."""

    shape: str
    rank: int
    config: dict[str, Any] = field(init=False)
    weights: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.config = {
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "bias": "none",
            "target_modules": list(TARGETS), "modules_to_save": None, "use_dora": False,
        }  # fmt: skip
        header: dict[str, Any] = {}
        end = 0
        for name, shape in _tensors(QWEN[self.shape], self.rank):
            start, end = end, end + 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        numbers = np.random.default_rng(1).integers(0, 256, end, np.uint8)
        numbers[1::2] = 0x3C  # the high byte: about 0.01 to 1
        self.weights = bytearray(struct.pack("<Q", len(text)) + text) + numbers.tobytes()

    def version(self, number: int) -> dict[str, Any]:
        """Keyword arguments of ``RunWriter.publish``. Changes the bytes of the last one.

        The weights are a view of a buffer, as a trainer's snapshot is.
        """
        self.weights[-2] = number % 256  # a low byte
        self.weights[-4] = number // 256 % 256
        return {
            "step": number, "weights": memoryview(self.weights), "adapter_config": self.config,
            "rank": self.rank, "dtype": "bfloat16",
        }  # fmt: skip


def _tensors(config: dict[str, Any], rank: int) -> Iterator[tuple[str, list[int]]]:
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {"k_proj": (hidden, kv), "v_proj": (hidden, kv), "down_proj": (middle, hidden)}
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, middle))
    for layer in range(config["num_hidden_layers"]):
        for target in TARGETS:
            block = "self_attn" if target[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            inner, outer = sizes.get(target, (hidden, hidden))
            yield f"{name}.lora_A.weight", [rank, inner]
            yield f"{name}.lora_B.weight", [outer, rank]

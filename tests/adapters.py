"""Small, valid adapters for tests: the files of a version without torch or peft."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

from adapter_bucket.base_model import BaseModelRef

BASE = BaseModelRef(id="org/model", architecture="0123456789abcdef")
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def adapter_config(
    rank: int = 4, targets: tuple[str, ...] = ("q_proj", "v_proj")
) -> dict[str, Any]:
    """Content of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "init_lora_weights": True,
    }


def safetensors_file(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """Serialise (dtype, shape, bytes) by name."""
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def adapter_tensors(
    seed: int, *, rank: int = 4, layers: int = 2, width: int = 16, dtype: str = "bfloat16"
) -> dict[str, tuple[str, list[int], bytes]]:
    """Random factors of q_proj and v_proj; another seed, other bytes."""
    random_bytes = random.Random(seed)
    name, size = DTYPES[dtype]
    tensors = {}
    for layer in range(layers):
        for module in ("q_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for side, shape in (("A", [rank, width]), ("B", [width, rank])):
                count = shape[0] * shape[1]
                # The high byte 0x3c is about 0.01 to 1 in every dtype: finite, and not zero.
                low = random_bytes.randbytes(count * (size - 1))
                data = b"".join(
                    low[i * (size - 1) : (i + 1) * (size - 1)] + b"\x3c" for i in range(count)
                )
                tensors[f"{key}.lora_{side}.weight"] = (name, shape, data)
    return tensors


def adapter_file(seed: int, **options: Any) -> bytes:
    """A whole ``adapter_model.safetensors``."""
    return safetensors_file(adapter_tensors(seed, **options))


def version(seed: int, **options: Any) -> dict[str, Any]:
    """Keyword arguments of ``RunWriter.publish`` for one version."""
    rank = options.get("rank", 4)
    return {
        "step": seed,
        "weights": adapter_file(seed, **options),
        "adapter_config": adapter_config(rank),
        "rank": rank,
        "dtype": options.get("dtype", "bfloat16"),
    }

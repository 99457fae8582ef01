"""A bucket in memory with a run in it, and adapters that weigh a few hundred bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.probe import Probe, make_probe
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from vllm_bucket_lora.acceptance import Served

BASE = BaseModelRef(id="models/base")
SERVED = Served(base_model=BASE, max_loras=8, max_lora_rank=8, dtype="float32")

PROBE = make_probe([1, 2, 3], [-1.0, -2.0], dtype="float32")

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
}


def adapter_bytes(value: float = 1.0, rank: int = 2, module: str = "layers.0.q_proj") -> bytes:
    """A safetensors file with one A and one B, filled with ``value``."""
    header: dict[str, Any] = {}
    data = b""
    for side, shape in (("A", [rank, 4]), ("B", [4, rank])):
        values = struct.pack(f"<{rank * 4}f", *[value] * (rank * 4))
        header[f"base_model.model.{module}.lora_{side}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def claim(
    store: Store, run_id: str = "run-a", *, window: int = 3, base: BaseModelRef = BASE
) -> RunWriter:
    """Become the writer of a run, without the trainer's own checks of what it publishes."""
    return RunWriter.claim(
        store, run_id, base_model=base, window=window, writer_id="test", check=False
    )


def publish(
    writer: RunWriter,
    version: int,
    weights: bytes | None = None,
    probe: Probe | None = None,
    **config: Any,
) -> None:
    """Commit a version, with parts of the adapter config replaced."""
    full = {**CONFIG, **config}
    writer.publish(
        version,
        step=version,
        weights=adapter_bytes(float(version)) if weights is None else weights,
        adapter_config=full,
        rank=full["r"],
        dtype="float32",
        probe=probe,
    )

"""Snapshot: the only part of a sync that the optimizer loop waits for.

Owns the way from live LoRA parameters to the bytes of ``adapter_model.safetensors``. The file's
header depends on names, shapes and dtype only, so the safetensors library writes it once, at start;
a snapshot then casts all parameters straight into the payload of that buffer: one multi-tensor copy
and, on a GPU, one copy to pinned memory. No serialisation is left for the publisher to do.

Source: https://huggingface.co/docs/safetensors (file format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from adapter_bucket.errors import ConfigError

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Path segments that torch.compile, FSDP and activation checkpointing add to parameter names."""

_FACTORS = ("lora_A", "lora_B")

_PEFT_PREFIX = "base_model.model."


def lora_parameters(model: Any, adapter: str) -> dict[str, torch.nn.Parameter]:
    """LoRA parameters of one adapter under the key names PEFT saves and vLLM loads.

    Args:
        model: A ``peft.PeftModel``, without an outer DDP wrapper.
        adapter: PEFT's name of the adapter, usually ``default``.

    Returns:
        ``base_model.model.<module path>.lora_{A,B}.weight`` -> parameter, sorted by name.

    Raises:
        ConfigError: the model has no LoRA parameter of that adapter, or a key lacks PEFT's prefix
            (vLLM would load such a file without error and serve zeros).
    """
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        segments = [part for part in name.split(".") if part not in _WRAPPERS]
        if segments[0] == "module":  # DDP wraps the whole model; deeper it is a name like any other
            del segments[0]
        factors = [part for part in segments if part.startswith("lora_")]
        if not factors or adapter not in segments[segments.index(factors[0]) :]:
            continue
        if segments[-3:] != [factors[0], adapter, "weight"] or factors[0] not in _FACTORS:
            raise ConfigError(
                f"parameter {name!r} is not a plain LoRA factor (lora_A or lora_B of a linear "
                "layer); vLLM cannot serve it. Target linear layers only"
            )
        key = ".".join([*segments[:-2], "weight"])
        if not key.startswith(_PEFT_PREFIX):
            raise ConfigError(f"LoRA parameter {name!r} does not start with {_PEFT_PREFIX!r}")
        found[key] = parameter
    if not found:
        raise ConfigError(f"the model has no LoRA parameters of adapter {adapter!r} to publish")
    return dict(sorted(found.items()))


class SnapshotBuffer:
    """The bytes of one adapter file, filled again and again.

    Not thread-safe: whoever holds it (the trainer while filling, the publisher while uploading)
    holds it alone.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype, pin_memory: bool
    ) -> None:
        template = safetensors.torch.save(
            {name: torch.zeros(*shape, dtype=dtype) for name, shape in shapes.items()},
            metadata={"format": "pt"},
        )
        offsets, payload_start = _payload_offsets(template)
        self._file = torch.empty(len(template), dtype=torch.uint8, pin_memory=pin_memory)
        self._file.copy_(torch.frombuffer(bytearray(template), dtype=torch.uint8))
        self._payload = self._file[payload_start:].view(dtype)
        self._offsets = offsets
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the file, bytes."""
        return int(self._file.numel())

    def data(self) -> memoryview:
        """The file's bytes. Valid until the next ``fill``."""
        return memoryview(self._file.numpy())

    def fill(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters in, cast to the buffer's dtype.

        Guarantees: when it returns, the bytes are complete and later changes of the parameters do
        not show in them.

        Args:
            parameters: Full (unsharded) tensors by key, all on one device.

        Raises:
            ConfigError: a tensor has another shape than the buffer was made for.
        """
        sources = [parameters[name] for name in self._shapes]
        for (name, shape), source in zip(self._shapes.items(), sources, strict=True):
            if source.shape != shape:  # a copy would broadcast it
                raise ConfigError(
                    f"{name} has shape {tuple(source.shape)}, expected {tuple(shape)}"
                )
        flat = self._flat_on(sources[0].device)
        with torch.no_grad():
            torch._foreach_copy_(self._views, sources)
        if flat is not self._payload:
            self._payload.copy_(flat, non_blocking=True)
            torch.cuda.current_stream(flat.device).synchronize()

    def _flat_on(self, device: torch.device) -> torch.Tensor:
        """Where the tensors are cast to. Made once, with its views: 392 of those take 2 ms."""
        if self._flat is None or self._flat.device != device:
            on_host = device.type == "cpu"
            flat = self._payload if on_host else torch.empty_like(self._payload, device=device)
            self._views = [self._view(flat, name) for name in self._shapes]
            self._flat = flat
        return self._flat

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        start, shape = self._offsets[name] // flat.element_size(), self._shapes[name]
        return flat[start : start + shape.numel()].view(shape)


def full_tensors(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of possibly sharded parameters. A collective: all ranks must call it."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in parameters.items()
    }


def _payload_offsets(template: bytes) -> tuple[dict[str, int], int]:
    """Byte offset of every tensor in the payload, and where the payload starts in the file."""
    header_bytes = int.from_bytes(template[:8], "little")
    header = json.loads(template[8 : 8 + header_bytes])
    offsets = {
        name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }
    return offsets, 8 + header_bytes

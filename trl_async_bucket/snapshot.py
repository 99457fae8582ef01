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
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch

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


def full_shape(parameter: Any) -> torch.Size:
    """Shape of the whole tensor, also where this rank holds a part of it (FSDP2) or none (ZeRO-3).

    DeepSpeed ZeRO-3 leaves a parameter of 0 elements behind and keeps its shape in ``ds_shape``.
    """
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@dataclass(frozen=True)
class Shards:
    """A whole tensor in parts, in order along one dimension."""

    parts: Sequence[torch.Tensor]
    dim: int | None
    """Dimension along which the parts follow each other; ``None`` if they are of the flattened
    tensor."""


class SnapshotBuffer:
    """The bytes of one adapter file, filled again and again.

    Not thread-safe: whoever holds it (the trainer while filling, the publisher while uploading)
    holds it alone.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype, pin_memory: bool
    ) -> None:
        if empty := [name for name, shape in shapes.items() if 0 in shape]:
            raise ConfigError(
                f"{empty[0]} has shape {tuple(shapes[empty[0]])}: nothing to publish. Under "
                "DeepSpeed ZeRO-3 take shapes from full_shape(), not from the parameter"
            )
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
        self._layout: tuple[Any, ...] = ()
        self._targets: list[torch.Tensor] = []
        self._filled: list[int] = []
        """Which parts have elements; each has its target."""

    @property
    def nbytes(self) -> int:
        """Size of the file, bytes."""
        return int(self._file.numel())

    def data(self) -> memoryview:
        """The file's bytes. Valid until the next ``fill``."""
        return memoryview(self._file.numpy())

    def fill(self, tensors: Mapping[str, torch.Tensor | Shards]) -> None:
        """Copy the tensors in, cast to the buffer's dtype.

        Guarantees: when it returns, the bytes are complete and later changes of the parameters do
        not show in them.

        Args:
            tensors: By key, whole or in parts, as ``AdapterGather.gather`` returns them.

        Raises:
            ConfigError: a tensor is missing, or has another shape than the buffer was made for.
        """
        if tensors.keys() != self._shapes.keys():
            differing = sorted(tensors.keys() ^ self._shapes.keys())
            raise ConfigError(
                f"the adapter has {len(tensors)} tensors, {len(self._shapes)} were expected; the "
                f"first that differs is {differing[0]}. Was the model changed after training began?"
            )
        sources: list[torch.Tensor] = []
        cuts: dict[str, tuple[int | None, int]] = {}
        for name in self._shapes:
            tensor = tensors[name]
            if isinstance(tensor, Shards):
                sources += tensor.parts
                cuts[name] = (tensor.dim, len(tensor.parts))
            else:
                sources.append(tensor)
        self._lay_out(tensors, sources, cuts)
        assert self._flat is not None
        with torch.no_grad():
            torch._foreach_copy_(self._targets, [sources[index] for index in self._filled])
        if self._flat is not self._payload:
            self._payload.copy_(self._flat, non_blocking=True)
            torch.cuda.current_stream(self._flat.device).synchronize()

    def has_effect(self) -> bool:
        """Whether the adapter changes the model: some B factor is not zero."""
        return any(
            bool(self._view(self._payload, name).any())
            for name in self._shapes
            if ".lora_B." in name
        )

    def _lay_out(
        self,
        tensors: Mapping[str, torch.Tensor | Shards],
        sources: Sequence[torch.Tensor],
        cuts: Mapping[str, tuple[int | None, int]],
    ) -> None:
        """Make the views that the parts are copied to. They are kept: 392 of them take 2 ms."""
        devices = {part.device for part in sources}
        layout = (devices, cuts, [part.shape for part in sources])
        if layout == self._layout:
            return
        # An offloaded parameter may lie beside others that do not.
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        if self._flat is None or self._flat.device != device:
            on_host = device.type == "cpu"
            self._flat = (
                self._payload if on_host else torch.empty_like(self._payload, device=device)
            )
        targets: list[torch.Tensor] = []
        for name in self._shapes:
            targets += self._views_of_parts(name, self._view(self._flat, name), tensors[name])
        self._filled = [index for index, target in enumerate(targets) if target.numel()]
        self._targets = [targets[index] for index in self._filled]
        self._layout = layout

    def _views_of_parts(
        self, name: str, view: torch.Tensor, tensor: torch.Tensor | Shards
    ) -> Sequence[torch.Tensor]:
        """Where each part of a tensor goes."""
        parts, dim = (tensor.parts, tensor.dim) if isinstance(tensor, Shards) else ([tensor], 0)
        if dim is None:
            view, dim = view.view(-1), 0
        before, length, after = view.shape[:dim], view.shape[dim], view.shape[dim + 1 :]
        lengths = [part.shape[dim] for part in parts]
        fit = all(p.shape == (*before, n, *after) for p, n in zip(parts, lengths, strict=True))
        if not fit or sum(lengths) != length:  # a copy would broadcast it
            raise ConfigError(
                f"{name} has shape {', '.join(str(tuple(part.shape)) for part in parts)}, expected "
                f"{tuple(self._shapes[name])}"
            )
        views: Sequence[torch.Tensor] = view.split(lengths, dim)
        return views

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        start, shape = self._offsets[name] // flat.element_size(), self._shapes[name]
        return flat[start : start + shape.numel()].view(shape)


def _payload_offsets(template: bytes) -> tuple[dict[str, int], int]:
    """Byte offset of every tensor in the payload, and where the payload starts in the file."""
    header_bytes = int.from_bytes(template[:8], "little")
    header = json.loads(template[8 : 8 + header_bytes])
    offsets = {
        name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    }
    return offsets, 8 + header_bytes

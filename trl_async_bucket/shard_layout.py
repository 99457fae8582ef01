"""How the parameters of a model lie on its ranks, under FSDP2 and DeepSpeed ZeRO-3.

Owns what is known of both about shards. Needs no DeepSpeed to be installed: ZeRO-3 keeps what is
needed on the parameter itself (``ds_tensor``: this rank's flat part, padded; ``ds_shape``;
``ds_numel``; ``ds_process_group``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from adapter_bucket.errors import ConfigError


@dataclass(frozen=True)
class ShardLayout:
    """How one parameter is cut over the ranks of a process group."""

    group: dist.ProcessGroup
    dim: int | None
    """Dimension that is cut; ``None`` if the flattened tensor is."""
    lengths: tuple[int, ...]
    """Of each rank's part along ``dim``, padding excluded."""


def settle(model: Any) -> None:
    """Refuse FSDP1, and put FSDP2 modules into the state in which their parameters are sharded.

    After a forward pass without a backward one FSDP2 leaves some modules unsharded: what is
    registered then is a temporary whole tensor whose memory is taken away later.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"module {name or 'the model'!r} is wrapped by FSDP1, which flattens LoRA factors "
                "and base weights into one parameter. Use FSDP2: fsdp_version: 2 in the accelerate "
                "config"
            )
        if isinstance(module, FSDPModule):
            module.reshard()


def layout_of(name: str, parameter: torch.Tensor) -> ShardLayout | Literal["whole", "other"]:
    """How the parameter lies: a ``ShardLayout``, ``"whole"`` on this rank, or ``"other"``."""
    if hasattr(parameter, "ds_tensor"):
        return _zero3_layout(name, parameter)
    if not isinstance(parameter, DTensor):
        return "whole"
    mesh = parameter.device_mesh
    cuts = [
        (dim, placement)
        for dim, placement in enumerate(parameter.placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]
    if not cuts:
        return "whole"
    (mesh_dim, placement), *more = cuts
    group = mesh.get_group(mesh_dim)
    # Tensor-parallel and strided placements: rare for LoRA, and DTensor knows how to undo them.
    if more or type(placement) is not Shard or mesh.get_local_rank(mesh_dim) != group.rank():
        return "other"
    return ShardLayout(
        group, placement.dim, _chunks(parameter.shape[placement.dim], mesh.size(mesh_dim))
    )


def _zero3_layout(name: str, parameter: Any) -> ShardLayout:
    part = parameter.ds_tensor
    if part is None or part.status.name != "AVAILABLE":
        raise ConfigError(
            f"the ZeRO-3 shard of {name} is not in memory. Keep parameters off NVMe: "
            'offload_param: {"device": "cpu"} or none'
        )
    if hasattr(part, "ds_quant_scale"):
        raise ConfigError(
            f"the ZeRO-3 shard of {name} is quantised; set zero_quantized_nontrainable_weights and "
            "zero_quantized_weights to false"
        )
    group = parameter.ds_process_group
    size = dist.get_world_size(group)
    lengths = _chunks(parameter.ds_numel, size)
    if part.numel() != lengths[0]:
        raise ConfigError(
            f"the ZeRO-3 shard of {name} has {part.numel()} elements; {lengths[0]} were expected "
            f"of {parameter.ds_numel} on {size} ranks. Install DeepSpeed 0.19"
        )
    return ShardLayout(group, None, lengths)


def _chunks(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of equal chunks of which the last may be shorter or empty, as ``torch.chunk``."""
    chunk = -(-length // parts)
    return tuple(max(0, min(chunk, length - chunk * index)) for index in range(parts))


def local_part(parameter: Any) -> torch.Tensor:
    """What this rank holds of a parameter, padding excluded. Call without autograd."""
    if hasattr(parameter, "ds_tensor"):
        part: torch.Tensor = parameter.ds_tensor
        before = part.numel() * dist.get_rank(parameter.ds_process_group)
        return part.narrow(0, 0, max(0, min(part.numel(), parameter.ds_numel - before)))
    if isinstance(parameter, DTensor):
        local: torch.Tensor = parameter.to_local()
        return local
    return parameter.detach()

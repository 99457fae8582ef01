"""LoRA factors of a sharded model, gathered on rank 0 in one collective per process group.

Owns the collective; how shards lie is in ``shard_layout``. Every rank casts its shards into one
flat buffer in the serving dtype and sends that to rank 0: half the bytes of fp32, and one
collective instead of one per tensor. Base weights are never gathered, and no other rank ever holds
a whole adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from adapter_bucket.errors import ConfigError
from trl_async_bucket.ranks import all_ranks, backends, from_rank_0, is_rank_0
from trl_async_bucket.shard_layout import ShardLayout, layout_of, local_part, settle
from trl_async_bucket.snapshot import Shards, full_shape, lora_parameters


class AdapterGather:
    """Gathers one adapter again and again.

    The constructor is local: it looks the parameters up, refuses what it cannot gather and plans
    the buffers. Make it after the model is prepared (FSDP2 and DeepSpeed replace or empty the
    parameters) and again for each training run.

    Args:
        model: The ``peft.PeftModel``, without an outer DDP or DeepSpeed wrapper.
        adapter: PEFT's name of the adapter.
        dtype: Serving dtype: what travels, and what rank 0 gets. Equal on all ranks.

    Raises:
        ConfigError: the model has no such adapter, or its parameters lie in a way that cannot be
            gathered (FSDP1, NVMe offload, quantised ZeRO shards). Says what to change.
    """

    def __init__(self, model: Any, adapter: str, *, dtype: torch.dtype) -> None:
        settle(model)
        self._parameters = lora_parameters(model, adapter)
        self.shapes = {name: full_shape(p) for name, p in self._parameters.items()}
        """Whole shapes by key, the same on every rank."""
        self._dtype = dtype
        self._plain: dict[str, torch.Tensor] = {}
        self._replicated: list[str] = []
        self._redistributed: list[str] = []
        members: dict[dist.ProcessGroup, list[_Member]] = {}
        for name, parameter in self._parameters.items():
            layout = layout_of(name, parameter)
            if isinstance(layout, ShardLayout):
                members.setdefault(layout.group, []).append(_Member(name, parameter, layout))
            elif layout == "whole" and not isinstance(parameter, DTensor):
                self._plain[name] = parameter
            elif layout == "whole":
                self._replicated.append(name)
            else:
                self._redistributed.append(name)
        # Groups without rank 0 hold replicas of what rank 0's groups hold (HSDP).
        self._flat = [
            _FlatGather(group, group_members, dtype)
            for group, group_members in members.items()
            if 0 in dist.get_process_group_ranks(group)
        ]

    @property
    def collectives(self) -> int:
        """Collectives of one ``gather`` that this rank takes part in."""
        return len(self._flat) + len(self._redistributed)

    def gather(self) -> Mapping[str, torch.Tensor | Shards]:
        """The adapter as it is now, on rank 0; nothing on the others. All ranks must call it.

        Returns:
            On rank 0 one entry per key, for ``SnapshotBuffer.fill``: whole parameters as they are,
            sharded ones as views of a buffer that the next ``gather`` overwrites. Elsewhere ``{}``.
        """
        found: dict[str, torch.Tensor | Shards] = {}
        with torch.no_grad():
            for flat in self._flat:
                found.update(flat.gather())
            for name in self._redistributed:
                found[name] = self._parameters[name].to(self._dtype).full_tensor()
            if not is_rank_0():
                return {}
            found.update(self._plain)
            for name in self._replicated:
                found[name] = local_part(self._parameters[name])
        return found


def plan_gather(model: Any, adapter: str, dtype: str | None) -> AdapterGather:
    """``AdapterGather`` in rank 0's dtype. All ranks must call it; an error on one is one on all.

    Args:
        dtype: Serving dtype without ``torch.``; looked at on rank 0 only.
    """
    with all_ranks("planning the gather of the adapter"):
        return AdapterGather(model, adapter, dtype=getattr(torch, str(from_rank_0(dtype))))


@dataclass(frozen=True)
class _Member:
    """One parameter of a flat gather."""

    name: str
    parameter: torch.Tensor
    layout: ShardLayout

    def part_shape(self, rank: int) -> torch.Size:
        """Shape of a rank's part."""
        length, shape = self.layout.lengths[rank], list(full_shape(self.parameter))
        if self.layout.dim is None:
            return torch.Size([length])
        shape[self.layout.dim] = length
        return torch.Size(shape)


class _FlatGather:
    """One collective: the parts of many parameters, back to back in a buffer per rank.

    Buffers and their views are kept. On a GPU they are small beside activations; on a CPU, fresh
    pages would cost more than the copy.
    """

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[_Member], dtype: torch.dtype
    ) -> None:
        self._group, self._members, self._dtype = group, members, dtype
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._shapes = [[member.part_shape(rank) for member in members] for rank in range(size)]
        # A gather sends equally much from every rank: the shorter ones send some bytes of no use.
        self._numel = max(sum(shape.numel() for shape in shapes) for shapes in self._shapes)
        self._staging: torch.Tensor | None = None
        self._targets: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._received: Mapping[str, Shards] = {}

    def gather(self) -> Mapping[str, Shards]:
        """Send this rank's parts; on rank 0, all parts by key."""
        parts = [local_part(member.parameter) for member in self._members]
        sent = self._stage(parts)
        if is_rank_0():
            self._make_rows(sent.device)
        dist.gather(sent, self._rows or None, dst=0, group=self._group)
        return self._received

    def _stage(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cast the parts into one buffer, where they are; return it where it travels."""
        held_on = parts[0].device
        if self._staging is None or self._staging.device != held_on:
            self._staging = torch.zeros(self._numel, dtype=self._dtype, device=held_on)
            self._targets = _cut(self._staging, self._shapes[self._rank])
        if changed := [
            (tuple(part.shape), tuple(target.shape))
            for part, target in zip(parts, self._targets, strict=True)
            if part.shape != target.shape
        ]:
            raise ConfigError(
                f"a LoRA shard has shape {changed[0][0]}, but {changed[0][1]} was planned: its "
                "parameter was replaced or re-sharded after training began"
            )
        filled = [index for index, part in enumerate(parts) if part.numel()]
        if filled:
            torch._foreach_copy_([self._targets[i] for i in filled], [parts[i] for i in filled])
        return self._staging.to(_transport_device(self._group, held_on))

    def _make_rows(self, device: torch.device) -> None:
        """On rank 0: a row of a buffer for each rank, and its views by key."""
        if self._rows and self._rows[0].device == device:
            return
        buffer = torch.empty((len(self._shapes), self._numel), dtype=self._dtype, device=device)
        self._rows = list(buffer.unbind(0))
        cut = [_cut(row, shapes) for row, shapes in zip(self._rows, self._shapes, strict=True)]
        self._received = {
            member.name: Shards([parts[index] for parts in cut], dim=member.layout.dim)
            for index, member in enumerate(self._members)
        }


def _cut(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Views of the given shapes, back to back from the start of a flat buffer."""
    views, start = [], 0
    for shape in shapes:
        views.append(flat[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return views


def _transport_device(group: dist.ProcessGroup, held_on: torch.device) -> torch.device:
    """Where the bytes travel: offloaded shards go through the GPU if the group has NCCL."""
    by_device = backends(group)
    fast = [
        device for device, backend in by_device.items() if device != "cpu" and backend != "gloo"
    ]
    if held_on.type in fast or (not fast and held_on.type in by_device):
        return held_on
    device_type = fast[0] if fast else next(iter(by_device))
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())

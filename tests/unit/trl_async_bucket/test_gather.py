"""Gathering over real gloo groups; what the parts must add up to is the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapter_bucket.errors import ConfigError
from tests.unit.trl_async_bucket.models import tiny_peft_model
from tests.unit.trl_async_bucket.rank_processes import as_ranks
from trl_async_bucket.gather import AdapterGather
from trl_async_bucket.snapshot import SnapshotBuffer, lora_parameters

ODD = {"target_modules": "all-linear", "r": 3}
"""No dimension of the factors divides by two."""


def file_of(tensors: Any, shapes: Any, dtype: torch.dtype) -> bytes:
    buffer = SnapshotBuffer(shapes, dtype=dtype, pin_memory=False)
    buffer.fill(tensors)
    return bytes(buffer.data())


def expected(dtype: torch.dtype, **lora: Any) -> bytes:
    parameters = lora_parameters(tiny_peft_model(**lora), "default")
    return file_of(parameters, {name: p.shape for name, p in parameters.items()}, dtype)


def gathered(model: Any, dtype: torch.dtype) -> tuple[bytes, int, int]:
    """File on rank 0, how many tensors this rank got, and collectives."""
    gather = AdapterGather(model, "default", dtype=dtype)
    gather.gather()
    tensors = gather.gather()  # the second one uses the buffers of the first
    data = file_of(tensors, gather.shapes, dtype) if tensors else b""
    return data, len(tensors), gather.collectives


def shard(model: Any, mesh_shape: tuple[int, ...] = (), **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    if mesh_shape:
        options["mesh"] = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replica", "shard"))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(dtype: torch.dtype, lora: dict[str, Any], mesh_shape: tuple[int, ...] = ()) -> Any:
    return gathered(shard(tiny_peft_model(**lora), mesh_shape), dtype)


def fsdp2_on_the_second_dimension() -> Any:
    from torch.distributed.tensor import Shard

    model = tiny_peft_model()
    model = shard(model, shard_placement_fn=lambda p: Shard(1 if p.ndim > 1 else 0))
    return gathered(model, torch.bfloat16)


def fsdp2_left_unsharded() -> Any:
    model = shard(tiny_peft_model(**ODD))
    model(input_ids=torch.ones(1, 4, dtype=torch.long))  # no backward: the root stays unsharded
    return gathered(model, torch.float32)


def ddp() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return gathered(DistributedDataParallel(tiny_peft_model(**ODD)).module, torch.float16)


def replace_factors(placements: Callable[[int], Any], mesh_shape: tuple[int, ...]) -> Any:
    """Distribute each factor by hand, whole layers need not be shardable that way."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = tiny_peft_model(**ODD)
    mesh = init_device_mesh("cpu", mesh_shape)
    index = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                tensor = distribute_tensor(parameter.detach(), mesh, placements(index))
                setattr(module, name, torch.nn.Parameter(tensor))
                index += 1
    return gathered(model, torch.bfloat16)


def mixed(index: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return [[Replicate()], [Shard(0)], [Shard(1)]][index % 3]


def two_sharded_dimensions(_index: int) -> Any:
    from torch.distributed.tensor import Shard

    return [Shard(0), Shard(1)]


def mixed_placements() -> Any:
    return replace_factors(mixed, (2,))


def tensor_parallel_and_sharded() -> Any:
    return replace_factors(two_sharded_dimensions, (2, 2))


def partition(model: Any, *, size: int | None = None, status: str = "AVAILABLE") -> Any:
    """Leave the factors as ZeRO-3 does: empty, with a flat padded part each.

    No DeepSpeed is installed for tests, and it could not make what must be refused.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    for parameter in lora_parameters(model, "default").values():
        flat = parameter.detach().reshape(-1)
        length = -(-flat.numel() // ranks) if size is None else size
        part = torch.full((length,), float("nan"))  # padding that must not reach the file
        own = flat[length * rank : length * (rank + 1)]
        part[: own.numel()] = own
        part.status = SimpleNamespace(name=status)
        parameter.ds_tensor, parameter.ds_process_group = part, dist.group.WORLD
        parameter.ds_shape, parameter.ds_numel = parameter.shape, flat.numel()
        parameter.data = torch.empty(0)
    return model


def zero3() -> Any:
    return gathered(partition(tiny_peft_model(**ODD)), torch.bfloat16)


def refused_zero3(broken: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        AdapterGather(partition(tiny_peft_model(), **broken), "default", dtype=torch.float32)
    return str(raised.value)


def shard_that_changed() -> str:
    from torch.distributed.tensor import DTensor, Shard

    model = shard(tiny_peft_model())
    gather = AdapterGather(model, "default", dtype=torch.float32)
    for parameter in lora_parameters(model, "default").values():
        parameter._local_tensor = torch.zeros(1, 1)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
    with pytest.raises(ConfigError) as raised:
        gather.gather()
    return str(raised.value)


def check(results: Any, dtype: torch.dtype, collectives: int | list[int], **lora: Any) -> None:
    (data, count, _), *others = results
    assert data == expected(dtype, **lora)
    assert count > 0
    assert [other[:2] for other in others] == [(b"", 0)] * len(others)
    wanted = [collectives] * len(results) if isinstance(collectives, int) else collectives
    assert [result[2] for result in results] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fsdp2_shards_are_gathered_bit_for_bit_in_one_collective(dtype: torch.dtype) -> None:
    check(as_ranks(2, fsdp2, dtype, ODD), dtype, 1, **ODD)


def test_a_rank_without_rows_of_a_factor_sends_none() -> None:
    lora = {"target_modules": "all-linear", "r": 1}
    check(as_ranks(3, fsdp2, torch.bfloat16, lora), torch.bfloat16, 1, **lora)


def test_with_hsdp_only_the_replica_of_rank_0_sends() -> None:
    results = as_ranks(4, fsdp2, torch.bfloat16, ODD, (2, 2))
    check(results, torch.bfloat16, [1, 1, 0, 0], **ODD)


def test_shards_of_the_second_dimension_are_gathered() -> None:
    check(as_ranks(2, fsdp2_on_the_second_dimension), torch.bfloat16, 1)


def test_modules_left_unsharded_by_a_forward_pass_are_gathered() -> None:
    check(as_ranks(2, fsdp2_left_unsharded), torch.float32, 1, **ODD)


def test_ddp_needs_no_collective() -> None:
    check(as_ranks(2, ddp), torch.float16, 0, **ODD)


def test_replicated_and_sharded_factors_mix() -> None:
    check(as_ranks(2, mixed_placements), torch.bfloat16, 1, **ODD)


def test_two_sharded_dimensions_are_left_to_dtensor() -> None:
    factors = len(lora_parameters(tiny_peft_model(**ODD), "default"))
    check(as_ranks(4, tensor_parallel_and_sharded), torch.bfloat16, factors, **ODD)


def test_zero_3_partitions_are_gathered_without_their_padding() -> None:
    check(as_ranks(2, zero3), torch.bfloat16, 1, **ODD)


@pytest.mark.parametrize(
    ("broken", "named"),
    [({"status": "NOT_AVAILABLE"}, "offload_param"), ({"size": 5}, "has 5 elements; 96 were")],
)
def test_a_zero_3_partition_that_cannot_be_read_is_refused(
    broken: dict[str, Any], named: str
) -> None:
    for text in as_ranks(2, refused_zero3, broken):
        assert named in text


def test_fsdp1_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    # Its constructor wants a GPU; that the class is there is all that matters.
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped._modules["_fsdp_wrapped_module"] = tiny_peft_model()
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        AdapterGather(wrapped, "default", dtype=torch.float32)


def test_a_parameter_re_sharded_after_the_plan_is_refused() -> None:
    for text in as_ranks(2, shard_that_changed):
        assert "re-sharded" in text


def test_one_process_gathers_nothing() -> None:
    data, _, collectives = gathered(tiny_peft_model(**ODD), torch.bfloat16)
    assert data == expected(torch.bfloat16, **ODD)
    assert collectives == 0

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from adapter_bucket.errors import ConfigError
from tests.unit.trl_async_bucket.models import tiny_peft_model, train_one_step
from trl_async_bucket.snapshot import Shards, SnapshotBuffer, lora_parameters


def filled(model: Any, dtype: torch.dtype = torch.float32) -> SnapshotBuffer:
    parameters = lora_parameters(model, "default")
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    buffer = SnapshotBuffer(shapes, dtype=dtype, pin_memory=False)
    buffer.fill(parameters)
    return buffer


def peft_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    # Without this PEFT asks the Hub whether the vocabulary was resized.
    model.save_pretrained(folder, save_embedding_layers=False)
    tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(
        folder / "adapter_model.safetensors"
    )
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_is_bit_exact_to_what_peft_saves(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_peft_model(target_modules="all-linear")
    ours = safetensors.torch.load(bytes(filled(model, dtype).data()))
    peft = peft_tensors(model, tmp_path)
    assert ours.keys() == peft.keys()
    for name, tensor in peft.items():
        assert torch.equal(ours[name], tensor.to(dtype)), name


def test_later_training_does_not_show_in_a_snapshot() -> None:
    model = tiny_peft_model()
    buffer = filled(model)
    before = bytes(buffer.data())
    train_one_step(model)
    assert bytes(buffer.data()) == before


def test_a_buffer_can_be_filled_again() -> None:
    model = tiny_peft_model()
    buffer = filled(model)
    train_one_step(model)
    buffer.fill(lora_parameters(model, "default"))
    assert bytes(buffer.data()) == bytes(filled(model).data())


def test_wrapper_segments_do_not_reach_the_key_names() -> None:
    class Wrapper(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, segment: str, inner: torch.nn.Module) -> None:
            super().__init__()
            self.add_module(segment, inner)

    plain = lora_parameters(tiny_peft_model(), "default")
    for segment in ("_orig_mod", "module", "_fsdp_wrapped_module"):
        wrapped = lora_parameters(Wrapper(segment, tiny_peft_model()), "default")
        assert wrapped.keys() == plain.keys(), segment
    assert all(name.startswith("base_model.model.") for name in plain)


def test_another_adapter_of_the_model_is_not_published() -> None:
    from peft import LoraConfig

    model = tiny_peft_model()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    assert not any("k_proj" in name for name in lora_parameters(model, "default"))


def test_a_model_without_the_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="no LoRA parameters of adapter 'missing'"):
        lora_parameters(tiny_peft_model(), "missing")


def test_an_adapter_whose_b_factors_are_zero_has_no_effect() -> None:
    model = tiny_peft_model()
    assert filled(model).has_effect()
    for name, parameter in lora_parameters(model, "default").items():
        if ".lora_B." in name:
            parameter.data.zero_()
    assert not filled(model).has_effect()


def test_a_tensor_without_elements_is_refused() -> None:
    """What a ZeRO-3 parameter looks like to code that does not know of ZeRO-3."""
    with pytest.raises(ConfigError, match=r"has shape \(0,\): nothing to publish"):
        SnapshotBuffer({"a": (0,)}, dtype=torch.float32, pin_memory=False)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.ones(4, 2)},
        {"a": torch.ones(4, 2), "b": torch.ones(3), "c": torch.ones(1)},
    ],
)
def test_a_missing_or_unknown_tensor_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    buffer = SnapshotBuffer({"a": (4, 2), "b": (3,)}, dtype=torch.float32, pin_memory=False)
    with pytest.raises(ConfigError, match=f"has {len(tensors)} tensors, 2 were expected"):
        buffer.fill(tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 2),  # a copy would broadcast these
        torch.ones(2),
        Shards([torch.ones(2, 2), torch.ones(1, 2)], dim=0),
        Shards([torch.ones(2, 2), torch.ones(2, 1)], dim=0),
        Shards([torch.ones(4), torch.ones(3)], dim=None),
    ],
)
def test_another_shape_is_refused(tensor: Any) -> None:
    buffer = SnapshotBuffer({"a": (4, 2)}, dtype=torch.float32, pin_memory=False)
    with pytest.raises(ConfigError, match=r"a has shape .*, expected \(4, 2\)"):
        buffer.fill({"a": tensor})


@pytest.mark.parametrize("dim", [0, 1, None])
def test_parts_become_the_whole(dim: int | None) -> None:
    whole = torch.arange(15.0).view(5, 3)
    source = whole if dim is not None else whole.view(-1)
    shards = Shards(
        [*source.split(2, dim or 0), source[:0]] if dim != 1 else source.split(2, 1), dim
    )
    buffer = SnapshotBuffer({"a": (5, 3)}, dtype=torch.float32, pin_memory=False)
    buffer.fill({"a": shards})
    assert torch.equal(safetensors.torch.load(bytes(buffer.data()))["a"], whole)


def test_parts_that_are_cut_anew_go_to_their_new_places() -> None:
    square = torch.arange(16.0).reshape(4, 4)
    buffer = SnapshotBuffer({"w": (4, 4)}, dtype=torch.float32, pin_memory=False)
    for dim in (0, 1, 0):
        buffer.fill({"w": Shards([part.contiguous() for part in square.chunk(2, dim)], dim=dim)})
        assert torch.equal(safetensors.torch.load(bytes(buffer.data()))["w"], square)

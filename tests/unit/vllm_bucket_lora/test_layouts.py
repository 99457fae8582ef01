"""Adapters read in one piece are what vLLM makes of the same files, or are not read so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_bucket_lora import copies
from vllm_bucket_lora.layouts import PIECE, Layouts

pytestmark = [
    pytest.mark.slow,  # imports vLLM
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # and that, torch
]

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
RANK = 4


def write(folder: Path, seed: int, *, alpha: int = 4, dtype: Any = torch.bfloat16) -> Path:
    """An adapter of two layers, as the trainer publishes it."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (RANK, 16)), ("B", (24, RANK))):
                tensor = torch.randn(shape, generator=random).to(dtype)
                tensors[f"{name}.lora_{part}.weight"] = (
                    tensor if seed or part == "A" else torch.zeros_like(tensor)
                )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def by_vllm(folder: Path, number: int = 1) -> Any:
    """What vLLM makes of the files: read, q, k and v packed, scaling merged."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), 128)
    names = {module.rpartition(".")[2] for module in MODULES}
    lora = LoRAModel.from_local_checkpoint(
        str(folder), names, helper, lora_model_id=number, device="cpu", dtype=torch.bfloat16
    )
    for layer in range(2):
        base = f"model.layers.{layer}.self_attn"
        parts = [lora.loras.pop(f"{base}.{part}_proj") for part in "qkv"]
        lora.loras[f"{base}.qkv_proj"] = PackedLoRALayerWeights.pack(parts)
    for weights in lora.loras.values():
        weights.optimize()
    return lora


def tensors_of(lora: Any) -> dict[Any, Any]:
    found = {}
    for name, weights in lora.loras.items():
        for attribute in ("lora_a", "lora_b"):
            value = getattr(weights, attribute)
            for part, tensor in enumerate(value if isinstance(value, list) else [value]):
                found[name, attribute, part] = tensor
    return found


@pytest.mark.parametrize("alpha", [4, 8, 10])
def test_the_second_adapter_is_what_vllm_makes_of_it(tmp_path: Path, alpha: int) -> None:
    layouts = Layouts()
    first, second = (write(tmp_path / str(n), n, alpha=alpha) for n in (1, 2))
    assert layouts.read(1, first, pin=False) is None
    assert layouts.learn(first, by_vllm(first))
    ours, theirs = layouts.read(2, second, pin=False), by_vllm(second, 2)
    assert (ours.id, ours.rank) == (theirs.id, theirs.rank)
    assert tensors_of(ours).keys() == tensors_of(theirs).keys()
    for place, tensor in tensors_of(theirs).items():
        assert torch.equal(tensors_of(ours)[place], tensor), place
    for name, weights in theirs.loras.items():
        assert ours.loras[name].scaling == weights.scaling
        assert type(ours.loras[name]) is type(weights)


def test_zeros_teach_nothing_and_the_next_adapter_does(tmp_path: Path) -> None:
    layouts = Layouts()
    untrained, trained = write(tmp_path / "0", 0), write(tmp_path / "1", 1)
    assert not layouts.learn(untrained, by_vllm(untrained))
    assert layouts.learn(trained, by_vllm(trained))
    again = layouts.read(3, untrained, pin=False)
    assert not tensors_of(again)["model.layers.0.mlp.down_proj", "lora_b", 0].any()


def test_a_layout_that_teaches_nothing_is_not_tried_for_ever(tmp_path: Path) -> None:
    layouts = Layouts()
    untrained, trained = write(tmp_path / "0", 0), write(tmp_path / "1", 1)
    for _ in range(3):
        assert not layouts.learn(untrained, by_vllm(untrained))
    assert not layouts.learn(trained, by_vllm(trained))


def test_an_adapter_that_vllm_changed_teaches_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "1", 1)
    lora = by_vllm(folder)
    lora.loras["model.layers.1.mlp.down_proj"].lora_b[0, 0] += 1
    assert not Layouts().learn(folder, lora)
    lora = by_vllm(folder)
    del lora.loras["model.layers.1.mlp.down_proj"]
    assert not Layouts().learn(folder, lora)


def test_another_dtype_is_left_to_vllm(tmp_path: Path) -> None:
    folder = write(tmp_path / "1", 1, dtype=torch.float32)
    assert not Layouts().learn(folder, by_vllm(folder))


def test_another_layout_and_a_file_that_is_not_whole_are_left_to_vllm(tmp_path: Path) -> None:
    layouts = Layouts()
    first, second = write(tmp_path / "1", 1), write(tmp_path / "2", 2)
    layouts.learn(first, by_vllm(first))
    other_alpha = write(tmp_path / "3", 3, alpha=8)
    assert layouts.read(3, other_alpha, pin=False) is None
    weights = second / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for spoiled in (whole[:-1], whole + b"\0", whole[:40], b""):
        weights.write_bytes(spoiled)
        assert layouts.read(2, second, pin=False) is None
    weights.unlink()
    assert layouts.read(2, second, pin=False) is None


def test_recorded_copies_take_another_adapter_to_the_same_places(tmp_path: Path) -> None:
    layouts = Layouts()
    folders = [write(tmp_path / str(n), n, alpha=8) for n in (1, 2, 3)]
    layouts.learn(folders[0], by_vllm(folders[0]))
    second, third = (layouts.read(n, folders[n - 1], pin=False) for n in (2, 3))
    slots = {place: torch.zeros(32, 32, dtype=torch.bfloat16) for place in tensors_of(second)}

    def fill(lora: Any) -> None:
        for place, tensor in tensors_of(lora).items():  # as vLLM's set_lora does
            slots[place][: tensor.shape[0], : tensor.shape[1]].copy_(tensor, non_blocking=True)

    found = copies.record(lambda: fill(second), getattr(second, PIECE).data, "cpu")
    assert found is not None
    found.make(getattr(third, PIECE).data)
    got = {place: slot.clone() for place, slot in slots.items()}
    fill(third)
    assert all(torch.equal(got[place], slots[place]) for place in slots)


def test_work_that_is_more_than_copies_is_not_recorded() -> None:
    data, slot = torch.randn(8), torch.zeros(8)
    assert copies.record(lambda: slot.copy_(data), data, "cpu") is not None
    assert copies.record(lambda: slot.copy_(data * 2), data, "cpu") is None
    assert copies.record(lambda: slot.copy_(torch.ones(8)), data, "cpu") is None
    assert copies.record(lambda: slot.copy_(data[:1]), data, "cpu") is None
    assert copies.record(lambda: slot.zero_(), data, "cpu") is None


def test_what_was_read_is_in_the_file(tmp_path: Path) -> None:
    layouts = Layouts()
    folder = write(tmp_path / "1", 1)
    layouts.learn(folder, by_vllm(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    got = layouts.read(1, folder, pin=False).loras[name].lora_b
    assert torch.equal(got, tensors[f"base_model.model.{name}.lora_B.weight"])

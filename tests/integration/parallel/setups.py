"""The ways of spreading a model over two ranks that are tried, as a launcher would set them up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Setup:
    """One way."""

    fsdp: bool = False
    """FSDP2; otherwise DDP, unless ``zero``."""
    offload: bool = False
    """FSDP2 keeps parameters off the device between steps."""
    zero: int | None = None
    """Stage of DeepSpeed's ZeRO."""
    quantise: Literal["uint8", "float32"] | None = None
    """QLoRA: dtype in which bitsandbytes stores its 4-bit weights. Only floats can be sharded."""
    lora_rank: int = 4


SETUPS = {
    "ddp": Setup(),
    "fsdp2": Setup(fsdp=True, lora_rank=3),  # does not divide by two ranks
    "fsdp2-offload": Setup(fsdp=True, offload=True),
    "zero2": Setup(zero=2),
    "zero3": Setup(zero=3, lora_rank=3),
    "qlora-ddp": Setup(quantise="uint8"),
    "qlora-fsdp2": Setup(quantise="float32", fsdp=True, lora_rank=3),
    "qlora-fsdp2-whole-base": Setup(quantise="uint8", fsdp=True),
    "qlora-zero3": Setup(quantise="float32", zero=3, lora_rank=3),
}


def environment(setup: Setup) -> dict[str, str]:
    """What ``accelerate launch`` sets for FSDP2."""
    if not setup.fsdp:
        return {}
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": str(setup.offload).lower(),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }


def make_accelerate_shard_on_cpu(setup: Setup) -> None:
    """Let accelerate 1.15 use FSDP2 and DeepSpeed over gloo, which both can.

    Its lists of what they run on lack the CPU.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    assert state.device.type == "cpu"
    if setup.fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if setup.zero is not None:
        # A faster all-reduce within one host, which it would compile now, for minutes.
        setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
        import_module("deepspeed.comm").init_distributed("gloo", auto_mpi_discovery=False)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED


def trainer_arguments(setup: Setup) -> dict[str, Any]:
    """Of ``TrainingArguments``."""
    given = {
        "accelerator_config": {"use_configured_state": True},
        "use_cpu": setup.zero is None,  # for accelerate DeepSpeed excludes the CPU
        "ddp_find_unused_parameters": False,
    }
    if setup.zero is not None:
        given["deepspeed"] = {
            # The last one for PEFT's own save_pretrained only.
            "zero_optimization": {
                "stage": setup.zero, "stage3_gather_16bit_weights_on_model_save": True,
            },
            "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's needs a compiler
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        }  # fmt: skip
    return given


def offload(trainer: Any) -> None:
    """Without pinned memory, which needs a GPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = trainer.accelerator.state.fsdp_plugin
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def save_base(setup: Setup, folder: Path) -> None:
    """A small Qwen2, no dimension of which divides by two ranks, unless it is to be quantised."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    odd = setup.quantise is None  # packed in blocks, to be cut at whole numbers of its storage
    config = Qwen2Config(
        vocab_size=320, hidden_size=64 - odd, intermediate_size=136 - odd, num_hidden_layers=2,
        head_dim=32, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def load_base(setup: Setup, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if setup.quantise is None:
        return AutoModelForCausalLM.from_pretrained(folder)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=getattr(torch, setup.quantise),
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised)

"""Model shapes and adapters of the benchmarks: public configurations with random weights.

Speed depends on shapes, not on values, so nothing is downloaded: a config, a byte tokenizer, and
random LoRA factors are all that is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QWEN: Mapping[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    },
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
}  # fmt: skip
"""Qwen2.5's shapes, and one of two layers for a CPU."""


def model_config(shape: str) -> Any:
    """A ``Qwen2Config`` of that shape."""
    from transformers import Qwen2Config

    return Qwen2Config(
        **QWEN[shape], max_position_embeddings=4096, tie_word_embeddings=shape in ("0.5B", "1.5B")
    )


def write_served_model(target: Path, shape: str, dtype: str) -> Path:
    """Config and tokenizer for ``vllm serve --load-format dummy``."""
    config = model_config(shape)
    config.dtype = dtype
    config.architectures = ["Qwen2ForCausalLM"]
    tokenizer = _full_tokenizer(config.vocab_size)
    config.eos_token_id = tokenizer.eos_token_id
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _full_tokenizer(vocabulary: int) -> Any:
    """A tokenizer that knows every token that random weights may sample.

    For tokens without text an ever longer tail of the answer is decoded at every token: three times
    the API server's work.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"t{number}" for number in range(vocabulary - len(alphabet) - 1))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def lora_model(shape: str, rank: int, device: str) -> Any:
    """A PEFT model, all-linear, whose base weights take no memory and whose LoRA factors are real.

    The factors are float32, as TRL trains them.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        base = Qwen2ForCausalLM(model_config(shape))
    base.name_or_path = f"random/{shape}"
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                real = torch.randn(parameter.shape, device=device) * 0.1
                setattr(module, name, torch.nn.Parameter(real))
    return model


def lora_state(model: Any) -> dict[str, Any]:
    """What TRL hands to ``save_pretrained``: the LoRA tensors on the host, whole.

    Where they are cut over ranks, every rank must call this: one collective for each.
    """
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for name, p in model.state_dict().items()
        if "lora_" in name
    }


def architecture(model_dir: Path) -> str:
    """The base model's fingerprint, as a replica that serves the directory computes it."""
    from adapter_bucket.base_model import architecture_fingerprint

    return architecture_fingerprint(json.loads((model_dir / "config.json").read_text()))


def trained(model: Any) -> list[Any]:
    """The parameters that are trained: the LoRA factors."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def cut_over_ranks(model: Any, ranks: int) -> Any:
    """The model, with each trained tensor cut over the ranks of the process group, as by FSDP2."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(next(iter(trained(model))).device.type, (ranks,))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                setattr(module, name, torch.nn.Parameter(shards))
    return model

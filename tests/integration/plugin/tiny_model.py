"""A base model of two layers and adapters for it, built in a second, with the truth about each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save as save_tensors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, logging

from adapter_bucket.base_model import BaseModelRef, architecture_fingerprint
from trl_async_bucket.adapter_config import portable_config

logging.disable_progress_bar()

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB = 320


def build_base(path: Path, **shape: int) -> Path:
    """Write a random Qwen2 with a byte tokenizer, the same one every time."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,  # head size 32: vLLM's CPU attention takes no 16
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=VOCAB,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        **{**small, **shape},
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def base_ref(path: Path) -> BaseModelRef:
    config = json.loads((path / "config.json").read_text())
    return BaseModelRef(id=str(path), architecture=architecture_fingerprint(config))


def make_adapter(
    base: Path, seed: int, *, rank: int = 4, **overrides: Any
) -> tuple[bytes, dict[str, Any]]:
    """A random adapter with a strong effect: (safetensors bytes, adapter config)."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"target_modules": TARGETS, "lora_alpha": 2 * rank, **overrides}
    model = get_peft_model(
        Qwen2ForCausalLM.from_pretrained(base),
        LoraConfig(r=rank, task_type="CAUSAL_LM", **settings),
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        with torch.no_grad():
            parameter.normal_(std=0.2)
        tensors[name.replace(".default", "")] = parameter.detach().clone()
    config = portable_config(
        model.peft_config["default"], module_names=tensors, base_model=str(base)
    )
    return save_tensors(tensors), config


def true_logprobs(base: Path, adapter: Path | None, tokens: list[int]) -> list[float]:
    """Log-probability of each token but the first, by transformers and peft in float32."""
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


def true_tokens(base: Path, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of ``prompt``, by transformers and peft in float32."""
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")

"""Builds the demo's base model: a Qwen2 of two layers that answers with random letters.

A short supervised warm-up teaches it the form of an answer and a faint hint of the task, so that
reinforcement learning has something to amplify. Takes seconds on a CPU and is the same every time.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

from demo.task import ANSWER_CHARS, LETTERS, prompt_for

logger = logging.getLogger(__name__)

HINT = 0.12
"""Share of warm-up answers that do what the question asks; the others are random letters."""

COPY_STEPS = 40
"""First steps, in which every answer does: so the model learns where to look."""

WARM_UP_STEPS = 160
_BATCH = 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_DONE = "warmed-up"


def build(target: Path, *, seed: int = 0, warm_up_steps: int = WARM_UP_STEPS) -> Path:
    """Write model and tokenizer to ``target`` unless they are there already; return it.

    Few warm-up steps are enough where nothing has to be learnt.
    """
    if (target / _DONE).exists():
        return target
    import torch

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    model = _model(tokenizer)
    loss = _warm_up(model, tokenizer, random.Random(seed), warm_up_steps)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / _DONE).write_text(f"loss {loss:.4f}\n")
    logger.info("base model warmed up: loss %.3f, written to %s", loss, target)
    return target


def _tokenizer() -> Any:
    """Bytes as tokens, with the special tokens of Qwen's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def _model(tokenizer: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # head size 32: vLLM's CPU attention takes 32, 64, …, not 16
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _example(tokenizer: Any, rng: random.Random, hint: float) -> tuple[list[int], int]:
    """Token ids of one question and answer, and where the answer starts."""
    letter = rng.choice(LETTERS)
    asked_for = rng.random() < hint
    answer = "".join(letter if asked_for else rng.choice(LETTERS) for _ in range(ANSWER_CHARS))
    prompt = tokenizer.apply_chat_template(
        prompt_for(letter), add_generation_prompt=True, return_dict=False
    )
    ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return [*prompt, *ids], len(prompt)


def _warm_up(model: Any, tokenizer: Any, rng: random.Random, steps: int) -> float:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        hint = 1.0 if step < COPY_STEPS else HINT
        examples = [_example(tokenizer, rng, hint) for _ in range(_BATCH)]
        ids = torch.tensor([tokens for tokens, _ in examples])  # all prompts are equally long
        labels = ids.clone()
        for row, (_, start) in enumerate(examples):
            labels[row, :start] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return float(loss.detach())

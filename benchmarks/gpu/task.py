"""What the whole run learns, and its base model: 0.5B's layers, warmed up on the spot.

As in the demo, the policy is asked for a letter and earns the share of it in its answer; answers
are longer here. Functions are at module level because TRL's rollout worker imports them by name.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes
from demo.task import LETTERS, prompt_for
from demo.tiny_model import _tokenizer as byte_tokenizer

VOCABULARY = 320
"""Bytes and a few special tokens, instead of 152 thousand: sampled tokens must be text."""

HINT = 0.2
_BATCH = 64


def letter_share(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """Reward: share of the answer's characters that are the letter asked for, 0 to 1."""
    rewards = []
    for completion, chat in zip(completions, prompts, strict=True):
        letter = chat[-1]["content"][-1]
        text = completion[-1].get("content") or ""
        rewards.append(text.count(letter) / max(len(text), 1))
    return rewards


def build(target: Path, shape: str, *, answer_chars: int, steps: int, device: str) -> float:
    """Write model and tokenizer; returns the seconds it took."""
    import torch
    from transformers import Qwen2ForCausalLM

    started = time.perf_counter()
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = byte_tokenizer()
    config = shapes.model_config(shape)
    config.vocab_size = VOCABULARY
    config.tie_word_embeddings = False
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen2ForCausalLM(config).to(device)
    rate = 2e-3 if shape == "tiny" else 2e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        hint = 1.0 if step < steps // 3 else HINT
        ids, labels = _batch(tokenizer, rng, hint, answer_chars, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(target)
    tokenizer.save_pretrained(target)
    seconds = time.perf_counter() - started
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"base model: {size:.0f} M parameters, loss {loss.item():.3f}, {seconds:.0f} s", flush=True
    )
    return seconds


def _batch(
    tokenizer: Any, rng: random.Random, hint: float, answer_chars: int, device: str
) -> tuple[Any, Any]:
    import torch

    rows, start = [], 0
    for _ in range(_BATCH):
        letter = rng.choice(LETTERS)
        asked_for = rng.random() < hint
        answer = "".join(letter if asked_for else rng.choice(LETTERS) for _ in range(answer_chars))
        prompt = tokenizer.apply_chat_template(
            prompt_for(letter), add_generation_prompt=True, return_dict=False
        )
        start = len(prompt)  # all prompts are equally long
        rows.append(
            [*prompt, *tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]]
        )
    ids = torch.tensor(rows, device=device)
    labels = ids.clone()
    labels[:, :start] = -100
    return ids, labels

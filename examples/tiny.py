"""What ``--tiny`` of the examples needs: a model of two layers, a bucket, a replica and a proxy.

Everything is made on this machine, offline. With ``--server``, ``--bucket-url`` and ``--model``
given, those are used instead: ``two_runs_one_fleet`` and the tests share one fleet that way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.cpu_trl import make_trl_run_on_cpu
from demo.fleet import Server, start_proxy, start_replica, wait_healthy
from demo.processes import Processes
from demo.tiny_model import build

DEFAULT_SERVER = "http://localhost:8000"
STEPS = 3
MAX_MODEL_LEN = 2048
SHORT_STEPS = 120
"""Warm-up with the ends of the prompts only, which are a sixth as long."""
LONG_STEPS = 80
"""Then at most so many with whole prompts."""
TAIL_TOKENS = 64
KNOWN_LOSS = 0.004
"""Mean loss of a token below which a call of 80 tokens is mostly written without a mistake."""
RIGHT_SUMS = 0.4
"""Share of right sums in the warm-up: rewards must differ for anything to be learnt."""

SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 96,
    "token_budget": 0,
    "max_staleness": 2,
    "max_inflight_tasks": 16,
    "queue_maxsize": 16,
    "chat_template_kwargs": {},
    "weight_sync_timeout": 120,
    "save_steps": STEPS,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 0,
}
"""What differs from a real recipe: small, on a CPU, and over in seconds."""


@contextmanager
def tiny(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Fill in what ``options`` leave open, and give the settings that differ from the recipe."""
    make_trl_run_on_cpu()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        settings = {**SETTINGS, "output_dir": str(scratch / "out")}
        if options.server != DEFAULT_SERVER:
            yield settings
            return
        with fleet(scratch) as (model, bucket, proxy):
            options.model, options.bucket_url, options.server = str(model), bucket, proxy.url
            yield settings


@contextmanager
def fleet(scratch: Path) -> Iterator[tuple[Path, str, Server]]:
    """The tiny model, a folder as bucket, and one replica behind a proxy."""
    model = tiny_model(scratch / "model")
    bucket = scratch / "bucket"
    bucket.mkdir()
    with Processes(scratch / "logs", _show) as processes:
        replica = start_replica(
            processes, "replica", model, bucket.as_uri(), "--max-model-len", str(MAX_MODEL_LEN)
        )
        proxy = start_proxy(processes, [replica])
        wait_healthy(processes, [replica, proxy])
        yield model, bucket.as_uri(), proxy


def _show(name: str, line: str) -> None:
    if "bucket" in line or "Error" in line:
        print(f"{name} | {line}", file=sys.stderr)


def sums() -> Any:
    """Sums of two digits, in the form of GSM8K."""
    from datasets import Dataset

    from examples.gsm8k_math import chat

    rows = [
        {"prompt": chat(f"{a}+{b}?"), "answer": f"#### {a + b}"} for a in range(5) for b in range(5)
    ]
    return Dataset.from_list(rows)


def stock_questions() -> Any:
    """Questions about one article, all that the tiny model can ask for."""
    from datasets import Dataset

    row = {"prompt": [{"role": "user", "content": "How many hooks?"}], "answer": "96"}
    return Dataset.from_list([row] * 16)


def tiny_model(target: Path) -> Path:
    """A model that answers sums with a digit, often the right one, and calls the tool ``stock``."""
    if (target / "tiny.json").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build(target, warm_up_steps=1)
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model.config.max_position_embeddings = MAX_MODEL_LEN  # rotary: there is no table to enlarge
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(0)
    tools = _tool_conversations(tokenizer)
    for step in range(SHORT_STEPS + LONG_STEPS):
        whole = step >= SHORT_STEPS
        answered_sums = [_sum_conversation(tokenizer, draw) for _ in range(8)]
        loss = _loss(model, tokenizer, answered_sums)
        known = _loss(model, tokenizer, tools if whole else [_end_of(row) for row in tools])
        (loss + known).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if whole and float(known.detach()) < KNOWN_LOSS:
            break
    model.save_pretrained(target)
    (target / "tiny.json").write_text(json.dumps({"steps": step, "loss": float(known.detach())}))
    return target


def _loss(model: Any, tokenizer: Any, rows: list[tuple[list[int], int]]) -> Any:
    """Mean loss of the answers' tokens."""
    import torch

    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for number, (tokens, start) in enumerate(rows):
        ids[number, : len(tokens)] = torch.tensor(tokens)
        labels[number, start : len(tokens)] = torch.tensor(tokens[start:])
    return model(input_ids=ids, labels=labels).loss


def _end_of(row: tuple[list[int], int]) -> tuple[list[int], int]:
    tokens, start = row
    cut = max(start - TAIL_TOKENS, 0)
    return tokens[cut:], start - cut


def _sum_conversation(tokenizer: Any, draw: random.Random) -> tuple[list[int], int]:
    from examples.gsm8k_math import chat

    a, b = draw.randrange(5), draw.randrange(5)
    answer = a + b if draw.random() < RIGHT_SUMS else draw.randrange(9)
    return _tokens(tokenizer, chat(f"{a}+{b}?"), f"#### {answer}")


def _tool_conversations(tokenizer: Any) -> list[tuple[list[int], int]]:
    """Both turns: the call, and the answer that the tool's answer allows.

    In the template that rollouts of several turns use: a prefix of it never changes.
    """
    from trl.chat_template_utils import get_training_chat_template

    from examples.tool_agent import STOCK, stock

    question = {"role": "user", "content": "How many hooks?"}
    call = {"name": "stock", "arguments": {"article": "hooks"}}
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }
    told = {"role": "tool", "name": "stock", "content": str(STOCK["hooks"])}
    form = {"tools": [stock], "chat_template": get_training_chat_template(tokenizer)}
    return [
        _tokens(tokenizer, [question], text, **form),
        _tokens(tokenizer, [question, asked, told], str(STOCK["hooks"]), **form),
    ]


def _tokens(tokenizer: Any, messages: list[Any], answer: str, **form: Any) -> tuple[list[int], int]:
    """Token ids of a conversation and its answer, and where the answer starts."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **form
    )
    ids = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return [*prompt, *ids], len(prompt)

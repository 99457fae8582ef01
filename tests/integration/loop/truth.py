"""The same question to a replica, and to transformers + peft on the files in the bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import requests

from adapter_bucket.status import ADAPTER_PARAM, STATUS_PATH, WAIT_PARAM
from demo.fleet import Server
from demo.task import prompt_for

TOKENS = 8


@dataclass(frozen=True)
class GreedyAnswer:
    """Greedy continuation of the fixed prompt."""

    tokens: list[int]
    logprobs: list[float]


def prompt_ids(model: Path) -> list[int]:
    """The fixed prompt."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model).apply_chat_template(
        prompt_for("c"), add_generation_prompt=True, return_dict=False
    )
    return ids


def ask_replica(server: Server, adapter: str, model: Path) -> GreedyAnswer:
    """Ask one replica, after waiting until it says the adapter is ready."""
    status = requests.get(
        f"{server.url}{STATUS_PATH}", params={ADAPTER_PARAM: adapter, WAIT_PARAM: "20"}, timeout=30
    ).json()
    assert status["adapter"]["state"] == "ready", status
    answer = requests.post(
        f"{server.url}/v1/completions",
        json={
            "model": adapter,
            "prompt": prompt_ids(model),
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
        },
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return GreedyAnswer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def ask_transformers(model: Path, adapter: Path) -> GreedyAnswer:
    """Generate with the reference implementation in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, adapter).eval()
    ids = prompt_ids(model)
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        while len(tokens) < TOKENS:
            scores = policy(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(scores.argmax())
            tokens.append(token)
            logprobs.append(float(scores[token]))
            ids.append(token)
            if token == base.config.eos_token_id:
                break
    return GreedyAnswer(tokens, logprobs)

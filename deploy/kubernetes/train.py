"""A plain TRL script: nothing in it knows of buckets, replicas or jobs.

The launcher runs it with ``python -m trl_async_bucket run``, with the proxy on TRL's own default
address, http://localhost:8000.
"""

from __future__ import annotations

import re
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def right_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of the answer is the solution's."""
    rewards = []
    for completion, solution in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[-1]["content"].replace(",", ""))
        rewards.append(float(bool(numbers) and numbers[-1] == solution.split()[-1]))
    return rewards


def main() -> None:
    """Train."""
    rows = load_dataset("openai/gsm8k", "main", split="train")
    AsyncGRPOTrainer(
        "Qwen/Qwen2.5-1.5B-Instruct",
        args=AsyncGRPOConfig(output_dir="out", max_steps=200, learning_rate=1e-5, save_steps=50),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        reward_funcs=right_number,
        train_dataset=rows.map(
            lambda row: {"prompt": [{"role": "user", "content": row["question"]}]},
            remove_columns=["question"],
        ),
    ).train(resume_from_checkpoint="bucket")


if __name__ == "__main__":
    main()

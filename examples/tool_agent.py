"""An agent that looks things up: several turns, tools, and a reward for what it found.

    python examples/tool_agent.py --bucket-url s3://my-bucket/rl        # beside the proxy

The model is given a question about a small warehouse and two tools. Each turn of a rollout names
the policy version that is newest then, so a conversation may begin with one version and end with
the next one.

``python -m examples.tool_agent --tiny`` does the same on a CPU, offline, with a model of two layers
that has learnt to call one of the tools.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
STOCK = {"nails": 420, "screws": 75, "bolts": 310, "hinges": 18, "hooks": 96, "rivets": 250}
PRICES = {"nails": 2, "screws": 3, "bolts": 5, "hinges": 12, "hooks": 7, "rivets": 4}

RECIPE: dict[str, Any] = {
    "output_dir": "out/tool-agent",
    "max_steps": 200,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 16,
    # Of one turn. A conversation is as long as its turns and the tools' answers together.
    "max_completion_length": 256,
    # A model that calls tools for ever would never be scored.
    "max_tool_calling_iterations": 4,
    # A conversation takes several requests, so its first tokens are older than those of one answer.
    "max_staleness": 6,
    "token_budget": 8192,
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "save_steps": 25,
    "save_total_limit": 2,
    "report_to": [],
}

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}


def stock(article: str) -> str:
    """Tell how many pieces of an article are in the warehouse.

    Args:
        article: Name of the article.

    Returns:
        The number of pieces.
    """
    return str(STOCK[article])


def price(article: str) -> str:
    """Tell what one piece of an article costs, in cents.

    Args:
        article: Name of the article.

    Returns:
        The price in cents.
    """
    return str(PRICES[article])


def questions(count: int = 512) -> Any:
    """Questions that need one tool or both."""
    from datasets import Dataset

    draw = random.Random(0)
    rows = []
    for _ in range(count):
        article = draw.choice(sorted(STOCK))
        if draw.random() < 0.5:
            text, answer = f"How many {article} are there?", STOCK[article]
        else:
            text = f"What are all {article} together worth, in cents?"
            answer = STOCK[article] * PRICES[article]
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(answer)})
    return Dataset.from_list(rows)


def found_it(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reward: 1 for the right number in the last message, 0.2 for having asked a tool at all."""
    rewards = []
    for messages, right in zip(completions, answer, strict=True):
        words = (messages[-1].get("content") or "").replace(",", "").replace(".", " ").split()
        asked = any(message["role"] == "tool" for message in messages)
        rewards.append(1.0 if right in words else 0.2 * asked)
    return rewards


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket-url", help="s3://bucket/prefix, hf://… or file:///dir")
    parser.add_argument("--server", default="http://localhost:8000", help="proxy or one replica")
    parser.add_argument("--run-id", default="tool-agent", help="name of the run in the bucket")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tiny", action="store_true", help="a CPU, offline, two layers")
    options = parser.parse_args()
    if options.tiny:
        from examples.tiny import stock_questions, tiny

        with tiny(options) as settings:
            train(options, stock_questions(), {**RECIPE, **settings}, tools=[stock])
    else:
        if not options.bucket_url:
            parser.error("--bucket-url is needed")
        train(options, questions(), RECIPE, tools=[stock, price])


def train(
    options: argparse.Namespace, dataset: Any, recipe: dict[str, Any], *, tools: list[Any]
) -> None:
    """One run, from its newest checkpoint in the bucket if there is one."""
    from peft import LoraConfig

    from trl_async_bucket import AsyncGRPOConfig, AsyncGRPOTrainer

    args = AsyncGRPOConfig(
        weight_sync="bucket",
        bucket_url=options.bucket_url,
        bucket_run_id=options.run_id,
        vllm_server_base_url=options.server,
        **recipe,
    )
    trainer = AsyncGRPOTrainer(
        options.model,
        args=args,
        peft_config=LoraConfig(**LORA),
        reward_funcs=found_it,
        train_dataset=dataset,
        tools=tools,
    )
    trainer.train(resume_from_checkpoint="bucket")


if __name__ == "__main__":
    main()

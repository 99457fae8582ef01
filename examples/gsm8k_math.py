"""Grade-school mathematics with a rank-1 adapter: the whole recipe, with reasons.

    vllm serve Qwen/Qwen2.5-1.5B-Instruct --enable-lora --max-lora-rank 8 --max-loras 7 \
        --max-model-len 2048 --logprobs-mode processed_logprobs --generation-config vllm \
        --plugin bucket-lora --bucket-lora-url s3://my-bucket/rl        # on each replica
    bucket-lora-proxy --replica http://replica-1:8000 --replica http://replica-2:8000
    python examples/gsm8k_math.py --bucket-url s3://my-bucket/rl        # beside the proxy

``python -m examples.gsm8k_math --tiny`` does the same in a minute or two on a CPU, offline, with a
model of two layers and sums of two digits.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
SYSTEM = "Think step by step. End with the answer, a number, after ####."
NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")

RECIPE: dict[str, Any] = {
    "output_dir": "out/gsm8k",
    "max_steps": 300,
    # LoRA wants about ten times the rate of full fine-tuning, whatever the rank; with Adam and a
    # reward of 0 or 1, twice that is still stable. Constant: the policy's data changes with it.
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    # 32 prompts × 16 answers for a step. A prompt that is always or never solved teaches nothing,
    # so many prompts; 16 answers find one right answer in a prompt that is solved once in ten.
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 32,
    "max_completion_length": 512,
    # Answers have 100 to 500 tokens: packed into rows of this many, no token is padding.
    "token_budget": 8192,
    # A rollout may be four versions old. Replicas then keep six versions ready: --max-loras 7.
    "max_staleness": 4,
    # Publish after each step. The step waits for a copy of the adapter, not for the network.
    "weight_sync_steps": 1,
    "temperature": 1.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    # Checkpoints go to the bucket in the background; a lost machine costs at most 25 steps.
    "save_steps": 25,
    "save_total_limit": 2,
    "report_to": [],
}

LORA: dict[str, Any] = {
    # A reward tells a policy about one bit per answer. Rank 1 on all linear layers has 1.2 million
    # parameters: more than a run of 150,000 answers can fill. The adapter is 2 MB on the wire.
    "r": 1,
    # The update is scaled by alpha / r; with alpha fixed, one learning rate suits every rank.
    "lora_alpha": 32,
    "target_modules": "all-linear",
}


def prompts() -> Any:
    """GSM8K's training questions; the solutions stay in the column ``answer``."""
    from datasets import load_dataset

    rows = load_dataset("openai/gsm8k", "main", split="train")
    return rows.map(lambda row: {"prompt": chat(row["question"])}, remove_columns=["question"])


def chat(question: str) -> list[dict[str, str]]:
    """The messages that ask for a solution."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def right_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reward: 1 where the number after #### is the solution's, else 0."""
    return [
        float(_number(completion[-1]["content"]) == _number(solution))
        for completion, solution in zip(completions, answer, strict=True)
    ]


def _number(text: str | None) -> float | None:
    found = NUMBER.findall(text or "")
    return float(found[-1].replace(",", "")) if found else None


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket-url", help="s3://bucket/prefix, hf://… or file:///dir")
    parser.add_argument("--server", default="http://localhost:8000", help="proxy or one replica")
    parser.add_argument("--run-id", default="gsm8k-rank1", help="name of the run in the bucket")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tiny", action="store_true", help="a CPU, offline, two layers")
    options = parser.parse_args()
    if options.tiny:
        from examples.tiny import sums, tiny

        with tiny(options) as settings:
            train(options, sums(), {**RECIPE, **settings})
    else:
        if not options.bucket_url:
            parser.error("--bucket-url is needed")
        train(options, prompts(), RECIPE)


def train(options: argparse.Namespace, dataset: Any, recipe: dict[str, Any]) -> None:
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
        reward_funcs=right_answer,
        train_dataset=dataset,
    )
    trainer.train(resume_from_checkpoint="bucket")


if __name__ == "__main__":
    main()

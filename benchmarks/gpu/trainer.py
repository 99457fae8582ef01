"""The trainer process of ``whole_run``: ``AsyncGRPOTrainer`` with one of three weight syncs."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from benchmarks.gpu import attention, task

WAYS = ("bucket", "trl", "nccl")
"""This package; TRL's adapter sync; TRL's merged sync, taken if the server has no LoRA."""

MAX_STALENESS = 4


def config(options: argparse.Namespace, cpu: bool) -> dict[str, Any]:
    """Settings common to all ways."""
    return {
        "output_dir": str(options.out),
        "max_steps": options.steps,
        "learning_rate": 2e-3 if cpu else 1e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "per_device_train_batch_size": 16 if cpu else 64,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": options.answer_chars + 4,
        "max_staleness": MAX_STALENESS,
        "max_inflight_tasks": 32 if cpu else 128,
        "queue_maxsize": 32 if cpu else 128,
        "token_budget": 0,
        "vllm_server_base_url": options.server,
        "weight_sync_timeout": 90,
        "chat_template_kwargs": {},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": not cpu,
        "dtype": "float32" if cpu else "bfloat16",
        "use_cpu": cpu,
        "gradient_checkpointing": False,
        "seed": 0,
    }


def main() -> None:
    """Train; one JSON line a step goes to ``<out>/metrics.jsonl``."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--bucket")
    parser.add_argument("--run-id")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--answer-chars", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    attention.install()
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from demo.task import prompt_rows
    from demo.train import _metrics_writer
    from trl_async_bucket import AsyncGRPOConfig, AsyncGRPOTrainer

    settings = config(options, cpu=not torch.cuda.is_available())
    if options.way == "bucket":
        bucket = {"bucket_url": options.bucket, "bucket_run_id": options.run_id}
        args = AsyncGRPOConfig(weight_sync="bucket", **bucket, **settings)
    else:
        args = AsyncGRPOConfig(weight_sync="trl", **settings)
    trainer = AsyncGRPOTrainer(
        str(options.model),
        args=args,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=task.letter_share,
        train_dataset=Dataset.from_list(prompt_rows()),
        peft_config=LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"
        ),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "metrics.jsonl").open("w", buffering=1) as file:
        trainer.add_callback(_metrics_writer(file))
        trainer.train()


if __name__ == "__main__":
    main()

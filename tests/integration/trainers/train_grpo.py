"""Trains a real ``GRPOTrainer`` on a CPU and writes down which version made which completions.

``python -m tests.integration.trainers.train_grpo --help``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

from demo.task import MAX_COMPLETION_TOKENS, letter_share, prompt_rows


def main() -> None:
    """Train, and write a line per generation to ``<out>/generations.jsonl``."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    from demo.cpu_trl import make_trl_run_on_cpu

    make_trl_run_on_cpu()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from trl_async_bucket import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        weight_sync="bucket",
        bucket_url=options.bucket,
        bucket_run_id=options.run_id,
        vllm_server_base_url=options.server,
        weight_sync_timeout=120,
        output_dir=str(options.out),
        max_steps=options.steps,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=MAX_COMPLETION_TOKENS,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        per_device_eval_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=options.model,
        args=args,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=letter_share,
        train_dataset=Dataset.from_list(prompt_rows()),
        eval_dataset=Dataset.from_list(prompt_rows()[:2]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")  # torchrun's; only rank 0 generates
    name = "generations.jsonl" if rank == "0" else f"generations-{rank}.jsonl"
    with (options.out / name).open("w", buffering=1) as file:
        _write_down(trainer, file)
        trainer.train()
        after = trainer.evaluate()
    if rank == "0":
        (options.out / "log.json").write_text(json.dumps([*trainer.state.log_history, after]))


def _write_down(trainer: Any, file: Any) -> None:
    """Note the step and the model of every answer, as the server named it."""
    client = trainer.vllm_generation.vllm_client
    if client is None:
        return  # not rank 0
    post = client._post

    def noting(url: str, **kwargs: Any) -> Any:
        answer = post(url, **kwargs)
        row = {"step": trainer.state.global_step, "model": answer["model"]}
        row["completions"] = len(answer["choices"])
        file.write(json.dumps(row) + "\n")
        return answer

    client._post = noting


if __name__ == "__main__":
    main()

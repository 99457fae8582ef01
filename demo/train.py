"""The demo's trainer process: a real TRL ``AsyncGRPOTrainer`` on the demo's task.

``python -m demo.train --help``. With ``--stock`` it is TRL's own trainer and weight sync, for
comparison; otherwise the same script with the bucket. One JSON line a step goes to
``<out>/metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from demo.task import MAX_COMPLETION_TOKENS, letter_share, prompt_rows

LORA_RANK = 8
MAX_STALENESS = 4


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="directory of the base model")
    parser.add_argument("--server", required=True, help="URL of the proxy or of one server")
    parser.add_argument("--out", required=True, type=Path, help="output directory")
    parser.add_argument("--bucket", help="bucket URL; needed without --stock")
    parser.add_argument("--run-id", help="name of the run in the bucket")
    parser.add_argument("--takeover", action="store_true", help="take over a run marked running")
    parser.add_argument("--ready", default="any", help="any or all")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--lora-rank", type=int, default=LORA_RANK, help="rank of the adapter")
    parser.add_argument(
        "--max-staleness", type=int, default=MAX_STALENESS, help="versions a rollout may be old"
    )
    parser.add_argument(
        "--save-steps", type=int, default=0, help="write a checkpoint every N steps"
    )
    parser.add_argument(
        "--least-step-s", type=float, default=0.0, help="seconds a step takes at least"
    )
    parser.add_argument("--resume", help="'bucket', 'bucket:required', or a local checkpoint")
    parser.add_argument("--stock", action="store_true", help="TRL's own weight sync")
    return parser.parse_args()


def _config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.out),
        "max_steps": options.steps,
        "learning_rate": 2e-3,
        # The first steps come from few samples; at full rate they decide too much.
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "max_completion_length": MAX_COMPLETION_TOKENS,
        "max_staleness": options.max_staleness,
        # Little in flight and in the queue: on two cores rollouts are faster than training, and
        # what waits grows stale.
        "max_inflight_tasks": 32,
        "queue_maxsize": 32,
        "token_budget": 0,
        "vllm_server_base_url": options.server,
        "weight_sync_timeout": 120,
        "chat_template_kwargs": {},
        "logging_steps": 1,
        "save_strategy": "steps" if options.save_steps else "no",
        "save_steps": options.save_steps or 500,
        "save_total_limit": 2,
        "resume_from_checkpoint": options.resume,
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "seed": 0,
    }


def main() -> None:
    """Train, and write the metrics of every step."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # A shell that starts a command in the background leaves SIGINT ignored, for its children too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _arguments()
    from demo.cpu_trl import make_trl_run_on_cpu

    make_trl_run_on_cpu()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    common: dict[str, Any] = {
        "model": str(options.model),
        "processing_class": AutoTokenizer.from_pretrained(options.model),
        "reward_funcs": letter_share,
        "train_dataset": Dataset.from_list(prompt_rows()),
        "peft_config": LoraConfig(
            r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules="all-linear"
        ),
    }
    if options.stock:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        trainer = AsyncGRPOTrainer(args=AsyncGRPOConfig(**_config(options)), **common)
    else:
        from trl_async_bucket import AsyncGRPOConfig as BucketConfig
        from trl_async_bucket import AsyncGRPOTrainer as BucketTrainer

        args = BucketConfig(
            weight_sync="bucket",
            bucket_url=options.bucket,
            bucket_run_id=options.run_id,
            bucket_takeover=options.takeover,
            bucket_ready=options.ready,
            **_config(options),
        )
        trainer = BucketTrainer(args=args, **common)
    options.out.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")  # torchrun's; the others log next to rank 0
    name = "metrics.jsonl" if rank == "0" else f"metrics-{rank}.jsonl"
    with (options.out / name).open("w", buffering=1) as file:
        trainer.add_callback(_metrics_writer(file))
        if options.least_step_s:
            trainer.add_callback(_brake(options.least_step_s))
        trainer.train(resume_from_checkpoint=options.resume)


def _metrics_writer(file: Any) -> Any:
    from transformers import TrainerCallback

    class MetricsWriter(TrainerCallback):  # type: ignore[misc]
        """Writes what the trainer logs as JSON lines."""

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            row = {"step": state.global_step, "time": time.time(), **(logs or {})}
            file.write(json.dumps(row) + "\n")

    return MetricsWriter()


def _brake(least_step_s: float) -> Any:
    from transformers import TrainerCallback

    class Brake(TrainerCallback):  # type: ignore[misc]
        """Makes each step at least so long, as a larger model's would be."""

        _ended = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(max(self._ended + least_step_s - time.monotonic(), 0))
            self._ended = time.monotonic()

    return Brake()


if __name__ == "__main__":
    main()

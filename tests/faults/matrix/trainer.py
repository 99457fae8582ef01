"""The trainer of the matrix: the drop-in asynchronous trainer on the demo's task, and a reporter.

It tells the hub what it does. Nothing of the product is changed: methods are wrapped to say when
they were called, and TRL's queue to say what was taken out of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.matrix.hub import FINISH, SLOWLY

MAX_STALENESS = 4
MAX_IN_FLIGHT = 12
MAX_STEPS = 100_000
"""Runs end when the hub says so."""
SLOW_STEP_S = 3.0
"""Shortest time of a step where the hub asks for it."""


class Reporter:
    """The trainer's connection to the hub. Thread-safe."""

    def __init__(self, port: int, run_id: str, life: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._answers = self._socket.makefile("r")
        self._lock = threading.Lock()
        self._about = {"run": run_id, "life": life}

    def tell(self, **facts: Any) -> None:
        """Say something."""
        with self._lock:
            self._send(facts)

    def ask(self, **facts: Any) -> str:
        """Say something and wait for the answer."""
        with self._lock:
            self._send({**facts, "ask": True})
            return self._answers.readline().strip()

    def _send(self, facts: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps({**self._about, **facts}).encode() + b"\n")


def arguments(given: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--server", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--life", required=True, help="name of this start, for the hub")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--hub", required=True, type=int)
    parser.add_argument("--resume", help="bucket, as a scheduler starts trainers")
    parser.add_argument("--save-steps", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.3, help="shortest time of a step")
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    """Train until the hub ends the run, or something stops it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = arguments(given)
    reporter = Reporter(options.hub, options.run_id, options.life)
    try:
        trainer = build(options, reporter)
        reporter.ask(before_training=True)
        trainer.train(resume_from_checkpoint=options.resume)
    except Exception as error:
        reporter.tell(stopped=f"{type(error).__name__}: {error}"[:500])
        raise
    reporter.tell(finished=trainer.state.global_step)


def build(options: argparse.Namespace, reporter: Reporter) -> Any:
    """The trainer, with everything wrapped that reports."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from demo.cpu_trl import make_trl_run_on_cpu
    from demo.task import letter_share, prompt_rows
    from demo.train import LORA_RANK
    from trl_async_bucket import AsyncGRPOConfig, AsyncGRPOTrainer

    make_trl_run_on_cpu()
    report_snapshots(reporter)
    report_what_is_taken(reporter)

    class Trainer(AsyncGRPOTrainer):
        def _advance_rollouts(self, version: int) -> None:
            super()._advance_rollouts(version)
            reporter.tell(ready=version)

    args = AsyncGRPOConfig(
        weight_sync="bucket",
        bucket_url=options.bucket,
        bucket_run_id=options.run_id,
        resume_from_checkpoint=options.resume,
        vllm_server_base_url=options.server,
        output_dir=str(options.out),
        max_steps=MAX_STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_staleness=MAX_STALENESS,
        max_inflight_tasks=MAX_IN_FLIGHT,
        queue_maxsize=12,
        token_budget=0,
        weight_sync_timeout=120,
        chat_template_kwargs={},
        logging_steps=10,
        save_steps=options.save_steps,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=int(time.time()),  # a resumed trainer must not have the same rollouts by its seed
    )
    trainer = Trainer(
        str(options.model),
        letter_share,
        args,
        train_dataset=Dataset.from_list(prompt_rows()),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear"),
    )
    trainer.add_callback(progress(trainer, reporter, options.step_s))
    return trainer


def report_snapshots(reporter: Reporter) -> None:
    """Stop at the end of each snapshot, until the hub answers."""
    from trl_async_bucket.snapshot import SnapshotBuffer

    fill = SnapshotBuffer.fill

    @functools.wraps(fill)
    def reporting(self: SnapshotBuffer, tensors: Any) -> None:
        fill(self, tensors)
        reporter.ask(snapshot=True)

    setattr(SnapshotBuffer, "fill", reporting)  # noqa: B010


def report_what_is_taken(reporter: Reporter) -> None:
    """Say which rollouts were found fresh enough, in full."""
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    take = RolloutQueueDataset.__iter__

    def reporting(self: Any) -> Iterator[dict[str, Any]]:
        for sample in take(self):
            reporter.tell(
                ids=[int(token) for token in sample["input_ids"]],
                mask=[int(bit) for bit in sample["completion_mask"]],
                logprobs=[float(value) for value in sample["old_log_probs"]],
            )
            yield sample

    RolloutQueueDataset.__iter__ = reporting


def progress(trainer: Any, reporter: Reporter, step_s: float) -> Any:
    """Says where training is; makes steps slow enough for two busy cores; ends it when told."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):  # type: ignore[misc]
        shortest_s = step_s

        def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            epoch = trainer._bucket.writer.manifest.writer.epoch
            reporter.tell(
                began=state.global_step, version=trainer._bucket.taken_version, epoch=epoch
            )

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            time.sleep(self.shortest_s)

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            answer = reporter.ask(step=state.global_step, version=trainer.model_version)
            control.should_training_stop = answer == FINISH
            self.shortest_s = SLOW_STEP_S if answer == SLOWLY else step_s

    return Progress()

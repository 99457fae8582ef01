"""A real trainer process that can be killed anywhere: transformers' ``Trainer`` on a tiny model.

It has the same ``TrainingRun`` in front as the drop-in trainers, and needs no server: nothing
generates. With ``--server`` it waits for a replica as they do. ``python -m
tests.integration.preemption.trainer --help``. With ``--kill-at`` it imports once, then forks a
child per point: each dies there, and the next one resumes on "another machine", an output directory
of its own, until one comes through. A line of JSON says what each one saw.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from adapter_bucket.ready_policy import ReadyPolicy
from tests.integration.preemption.killing import ARMED, in_child, live, say, watch_store
from tests.unit.trl_async_bucket.models import tiny_peft_model
from trl_async_bucket.config import BucketSyncFields
from trl_async_bucket.preemptible_run import PreemptibleRun
from trl_async_bucket.sync import BucketSync
from trl_async_bucket.training_run import TrainingRun

ROWS = 64
WINDOW = 2


@dataclass
class Config(BucketSyncFields, TrainingArguments):  # type: ignore[misc]
    """Transformers' arguments with the bucket's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_bucket_fields(output_dir=self.output_dir)


class BucketTrainer(TrainingRun, Trainer):  # type: ignore[misc]
    """Publishes its adapter after every step."""

    args: Config
    publish_timeout_s = 60.0
    server_url = ""

    def __init__(self, model: Any, args: Config, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        self._metrics: Any = {"train": defaultdict(list)}
        self._uses_bucket = True
        if self.is_world_process_zero():
            timeout_s = self.publish_timeout_s
            settings = args.sync_settings(
                window=WINDOW, max_lag=10_000, server_url=self.server_url, timeout_s=timeout_s
            )
            if not self.server_url:
                settings = replace(settings, server_url=None, ready=ReadyPolicy("none"))
            self._bucket = BucketSync(model, "default", settings)
        self.add_callback(SyncCallback(self))


class SyncCallback(TrainerCallback):  # type: ignore[misc]
    """As TRL's: once before the first step, then after every one."""

    def __init__(self, trainer: BucketTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._sync_to_bucket()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._sync_to_bucket()


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Fixed random token rows; a row can be slow, as rollouts are."""

    def __init__(self, row_s: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, 64, (ROWS, 8), generator=generator)
        self._row_s = row_s

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._row_s:
            say(waiting=True)
            time.sleep(self._row_s)
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Teller(TrainerCallback):  # type: ignore[misc]
    """Says where training is."""

    def __init__(self, trainer: BucketTrainer, step_s: float) -> None:
        self._trainer = trainer
        self._step_s = step_s

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        bucket = self._trainer._bucket
        if bucket is not None:
            writer = bucket.writer.manifest.writer
            say(began=state.global_step, version=bucket.taken_version, epoch=writer.epoch)
        ARMED.set()

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        time.sleep(self._step_s)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        say(step=state.global_step, version=self._trainer.model_version, rank=args.process_index)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--run-id", default="run")
    parser.add_argument("--server", default="", help="replica whose readiness is waited for")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="base model; a tiny one of its own by default")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--resume")
    parser.add_argument("--grace-s", type=float, default=25.0)
    parser.add_argument("--step-s", type=float, default=0.0, help="each step is made this slow")
    parser.add_argument("--row-s", type=float, default=0.0, help="each batch is made this slow")
    parser.add_argument("--put-s", type=float, default=0.0, help="each upload is made this slow")
    parser.add_argument("--kill-at", action="append", default=[], help="<n>:<pattern>")
    parser.add_argument("--step-by-step", action="store_true", help="a line on stdin per life")
    parser.add_argument("--alone", help="first, a run that nobody stops over this bucket")
    return parser.parse_args()


def peft_model(base: Path) -> Any:
    """An adapter that a replica of this base model can serve."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)


def train(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Train; how many steps, and every bit of the result, to be compared with other runs'."""
    torch.manual_seed(0)
    config = Config(
        output_dir=str(out),
        bucket_url=options.bucket,
        bucket_run_id=options.run_id,
        bucket_probe_every=0,
        bucket_grace_s=options.grace_s,
        resume_from_checkpoint=options.resume,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    model = peft_model(options.model) if options.model else tiny_peft_model()
    BucketTrainer.server_url = options.server
    trainer = BucketTrainer(model, config, train_dataset=Rows(options.row_s))
    if not options.quiet:
        trainer.add_callback(Teller(trainer, options.step_s))
    trainer.train()
    weights = [p.detach() for name, p in trainer.model.named_parameters() if "lora_" in name]
    total = torch.cat([weight.flatten() for weight in weights]).double()
    return {"steps": trainer.state.global_step, "digest": total.sum().item().hex()}


def train_alone(options: argparse.Namespace) -> None:
    """The same training with nobody who stops it or watches."""
    alone = argparse.Namespace(**vars(options))
    alone.bucket, alone.resume, alone.server, alone.quiet = options.alone, None, "", True
    if in_child(lambda: say(undisturbed=train(alone, options.out / "alone"))):
        raise SystemExit("the training that nobody stops failed")


def main() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    options = arguments()
    options.quiet = False
    if options.alone:
        train_alone(options)
    if options.kill_at:
        live(
            options.kill_at,
            lambda number: say(finished=train(options, options.out / f"machine-{number}")),
            step_by_step=options.step_by_step,
        )
        return
    if options.put_s:

        def slow(event: str) -> None:
            if event.startswith("before upload"):
                time.sleep(options.put_s)

        watch_store(slow)
    say(finished=train(options, options.out))


if __name__ == "__main__":
    assert issubclass(TrainingRun, PreemptibleRun)
    try:
        main()
    finally:
        sys.stdout.flush()
        if torch.distributed.is_initialized():  # else gloo's threads may abort the process's end
            torch.distributed.destroy_process_group()

"""A real trainer process that can be killed anywhere: transformers' ``Trainer`` on a tiny model.

It has the same ``TrainingRun`` in front as the drop-in trainers, and needs no server: nothing
generates. ``python -m tests.integration.preemption.trainer --help``. With ``--kill-at`` it imports
once, then forks a child per point: each dies there, and the next one resumes on "another machine",
an output directory of its own, until one comes through. A line of JSON says what each one saw.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.unit.trl_async_bucket.models import tiny_peft_model
from trl_async_bucket import sync
from trl_async_bucket.config import BucketSyncFields
from trl_async_bucket.preemptible_run import PreemptibleRun
from trl_async_bucket.snapshot import SnapshotBuffer
from trl_async_bucket.sync import BucketSync
from trl_async_bucket.training_run import TrainingRun

ROWS = 64

ARMED = threading.Event()
"""Set once a life has said where it began: a test counts those."""


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

    def __init__(self, model: Any, args: Config, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        self._metrics: Any = {"train": defaultdict(list)}
        self._uses_bucket = True
        if self.is_world_process_zero():
            timeout_s = self.publish_timeout_s
            settings = args.sync_settings(
                window=2, max_lag=10_000, server_url="", timeout_s=timeout_s
            )
            self._bucket = BucketSync(model, "default", without_server(settings))
        self.add_callback(SyncCallback(self))


class SyncCallback(TrainerCallback):  # type: ignore[misc]
    """As TRL's: once before the first step, then after every one."""

    def __init__(self, trainer: BucketTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._sync_to_bucket()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._sync_to_bucket()


def without_server(settings: Any) -> Any:
    from dataclasses import replace

    return replace(settings, server_url=None, ready=ReadyPolicy("none"))


class Killing:
    """Passes calls on to a store; kills the process before or after the n-th matching write."""

    def __init__(self, store: Store, kill: Callable[[str], None]) -> None:
        self._store = store
        self._kill = kill

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("create", "replace", "upload", "delete"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            targets = args[0] if name == "delete" else [args[0]]
            for target in targets:
                self._kill(f"before {name} {target}")
                first = [target] if name == "delete" else target
                result = found(first, *args[1:], **options)
                self._kill(f"after {name} {target}")
            return result if name != "delete" else None

        return call


class KillPoint:
    """``<n>:<pattern>``: the n-th event that matches kills this process."""

    def __init__(self, text: str) -> None:
        count, _, pattern = text.partition(":")
        self._left = int(count)
        self._pattern = re.compile(pattern)

    def __call__(self, event: str) -> None:
        if ARMED.is_set() and self._pattern.search(event):
            self._left -= 1
            if self._left == 0:
                say(died=event)
                os.kill(os.getpid(), signal.SIGKILL)


def watch_store(told: Callable[[str], None]) -> None:
    """Tell every write of this process, before and after."""
    setattr(sync, "open_store", lambda url: Killing(open_store(url), told))  # noqa: B010


def install(kill: Callable[[str], None]) -> None:
    """Put the kill points into this process."""
    watch_store(kill)
    fill = SnapshotBuffer.fill

    def killing_fill(self: SnapshotBuffer, tensors: Any) -> None:
        fill(self, tensors)
        kill("snapshot")

    setattr(SnapshotBuffer, "fill", killing_fill)  # noqa: B010


def say(**facts: Any) -> None:
    """One line for the test, whatever happens next."""
    os.write(1, json.dumps(facts).encode() + b"\n")


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
    return parser.parse_args()


def peft_model(base: Path) -> Any:
    """An adapter that a replica of this base model can serve."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)


def train(options: argparse.Namespace, out: Path) -> None:
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
    trainer = BucketTrainer(model, config, train_dataset=Rows(options.row_s))
    trainer.add_callback(Teller(trainer, options.step_s))
    trainer.train()
    weights = [p.detach() for name, p in trainer.model.named_parameters() if "lora_" in name]
    # Every bit of the result, for the comparison with a run that was never stopped.
    total = torch.cat([weight.flatten() for weight in weights]).double()
    say(finished=trainer.state.global_step, digest=total.sum().item().hex())


def live(options: argparse.Namespace) -> None:
    """One life after the other, each in a child that dies at its point."""
    for number, point in enumerate([*options.kill_at, f"0:{'never'}"]):
        child = os.fork()
        if child == 0:
            try:
                install(KillPoint(point))
                train(options, options.out / f"machine-{number}")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"life {number} failed")  # its traceback stands above
        say(life=number, code=code)


def main() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    options = arguments()
    if options.kill_at:
        live(options)
        return
    if options.put_s:

        def slow(event: str) -> None:
            if event.startswith("before upload"):
                time.sleep(options.put_s)

        watch_store(slow)
    train(options, options.out)


if __name__ == "__main__":
    assert issubclass(TrainingRun, PreemptibleRun)
    main()
    sys.stdout.flush()

"""One of two ranks of real ``transformers.Trainer`` runs, beside PEFT's own files.

``python -m tests.integration.parallel.worker --out DIR NAME …`` with ``RANK`` set, once for each
rank, over gloo on CPUs. It imports once, then forks a child for each name: a setup whose every
adapter is compared with what PEFT saves, or a way for the bucket to fail (``failing``). What rank 0
found is in ``DIR/NAME/report.json``, what a rank said in ``DIR/NAME/rank-N.log``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integration.parallel import failing
from tests.integration.parallel.probing import ProbeOnce, difference_to_one_process
from tests.integration.parallel.setups import (
    SETUPS,
    Setup,
    environment,
    load_base,
    make_accelerate_shard_on_cpu,
    offload,
    save_base,
    trainer_arguments,
)
from trl_async_bucket.callback import BucketSyncCallback

STEPS = 3
RUN_ID = "parallel"
GROUP_TIMEOUT = datetime.timedelta(seconds=60)


class CollectiveCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts collectives by name, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional"):
            self.counts[name.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class CountedSync(BucketSyncCallback):
    """Publishes every step, where the newest would win, and notes the collectives of each."""

    def __init__(self, bucket: Path) -> None:
        super().__init__(
            f"file://{bucket}", RUN_ID, every_steps=1, dtype="bfloat16", keep_every=1, timeout_s=5
        )
        self.collectives: list[dict[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with CollectiveCounter() as counter:
            super().on_step_end(args, state, control, **kwargs)
        self.collectives.append(dict(counter.counts))
        if self._bucket is not None:
            self._bucket.wait_lag(0)  # the next snapshot could replace one that still waits


class SaveEachStep(TrainerCallback):  # type: ignore[misc]
    """What PEFT saves of each step, by the way that users of the trainer take."""

    def __init__(self, trainer: Any, out: Path) -> None:
        self.trainer, self.out = trainer, out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.save_model(str(self.out / f"peft-{state.global_step}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    for name in options.names:
        child = os.fork()
        if child == 0:
            run_in_child(name, options.out / name)
        os.waitpid(child, 0)


def run_in_child(name: str, out: Path) -> None:
    """One name, on this rank; never returns."""
    rank = os.environ["RANK"]
    out.mkdir(parents=True, exist_ok=True)
    log = os.open(out / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        os.environ.update(LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(environment(SETUPS[name]) if name in SETUPS else {})
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{out}/meeting",
            rank=int(rank),
            world_size=2,
            timeout=GROUP_TIMEOUT,
        )
        report = train(SETUPS[name], out) if name in SETUPS else failing.train(name, out)
        (out / f"report-{rank}.json").write_text(json.dumps(report))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def train(setup: Setup, out: Path) -> dict[str, Any]:
    """Publish and save every step, then compare."""
    trainer = make_trainer(setup, out)
    sync = CountedSync(out / "bucket")
    trainer.add_callback(sync)
    trainer.add_callback(SaveEachStep(trainer, out))
    probing = ProbeOnce(trainer)
    trainer.add_callback(probing)
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return {}
    assert probing.probe is not None
    return {
        "model": type(trainer.model_wrapped).__name__,
        "collectives": sync.collectives,
        "steps": [compare(out, step) for step in range(1, STEPS + 1)],
        "base": base_weights(trainer.model),
        "probe_difference": difference_to_one_process(probing.probe, setup, out),
    }


def make_trainer(setup: Setup, out: Path) -> Any:
    make_accelerate_shard_on_cpu(setup)
    args = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **trainer_arguments(setup),
    )
    if torch.distributed.get_rank() == 0:
        save_base(setup, out / "base")
    torch.distributed.barrier()
    lora = LoraConfig(r=setup.lora_rank, target_modules="all-linear")
    model = get_peft_model(load_base(setup, out / "base"), lora)
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    if setup.offload:
        offload(trainer)
    return trainer


def rows() -> list[dict[str, Any]]:
    """Random tokens to be learned by heart."""
    tokens = torch.randint(5, 320, (16, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def compare(out: Path, step: int) -> dict[str, Any]:
    """The version of a step as it lies in the bucket, beside what PEFT saved of that step."""
    version = out / "bucket" / "runs" / RUN_ID / "adapters" / f"v{step:08d}"
    ours = safetensors.torch.load_file(version / "adapter_model.safetensors")
    peft = safetensors.torch.load_file(out / f"peft-{step}" / "adapter_model.safetensors")
    return {
        "tensors": len(peft),
        "same_names": ours.keys() == peft.keys(),
        "differing": [n for n in peft if not torch.equal(ours[n], peft[n].to(torch.bfloat16))],
        "changed_b": sum(bool(ours[name].any()) for name in ours if ".lora_B." in name),
    }


def base_weights(model: Any) -> dict[str, Any]:
    """How a weight of the base model lies, to know that the setup is what its name says."""
    weight = model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    held = getattr(weight, "ds_tensor", weight)
    local = held.to_local() if hasattr(held, "to_local") else held
    return {"dtype": str(weight.dtype), "elements": local.numel()}


if __name__ == "__main__":
    main()

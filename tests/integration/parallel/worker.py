"""One rank of a real ``transformers.Trainer`` run over a real bucket, beside PEFT's own files.

Started by ``accelerate launch`` or ``torchrun``; see ``test_parallel.py``. Each step's adapter is
published by ``BucketSyncCallback`` and then saved the usual way (``trainer.save_model``). At the
end rank 0 compares the two, file by file, and writes what it found.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from trl_async_bucket.callback import BucketSyncCallback

STEPS = 3
RUN_ID = "parallel"


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
    """Notes the collectives of each version it publishes."""

    def __init__(self, bucket: Path) -> None:
        super().__init__(
            f"file://{bucket}", RUN_ID, every_steps=1, dtype="bfloat16", keep_every=1, timeout_s=5
        )
        self.collectives: list[dict[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with CollectiveCounter() as counter:
            super().on_step_end(args, state, control, **kwargs)
        self.collectives.append(dict(counter.counts))


class SaveEachStep(TrainerCallback):  # type: ignore[misc]
    """What PEFT saves of each step, by the way that users of the trainer take."""

    def __init__(self, trainer: Any, out: Path) -> None:
        self.trainer, self.out = trainer, out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.save_model(str(self.out / f"peft-{state.global_step}"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--lora-rank", type=int, default=3)
    options = parser.parse_args()
    trainer = make_trainer(options)
    sync = CountedSync(options.out / "bucket")
    trainer.add_callback(sync)
    trainer.add_callback(SaveEachStep(trainer, options.out))
    trainer.train()
    if trainer.accelerator.is_main_process:
        report = {
            "offload": offloads(trainer),
            "model": type(trainer.model_wrapped).__name__,
            "collectives": sync.collectives,
            "steps": [compare(options.out, step) for step in range(1, STEPS + 1)],
        }
        (options.out / "report.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def make_trainer(options: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import CPUOffloadPolicy
    from transformers import Trainer, TrainingArguments

    make_accelerate_shard_on_cpu()
    args = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        accelerator_config={"use_configured_state": True},
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        ddp_timeout=60,
        seed=0,
    )
    lora = LoraConfig(r=options.lora_rank, target_modules="all-linear")
    model = get_peft_model(base_model(), lora)
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    if offloads(trainer):
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU
    return trainer


def offloads(trainer: Any) -> bool:
    """Whether FSDP2 keeps parameters off the device between steps."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)


def make_accelerate_shard_on_cpu() -> None:
    """Let accelerate 1.15 use FSDP2 over gloo, as the launcher's environment asks for.

    Its list of what FSDP can run on lacks the CPU, though PyTorch's ``fully_shard`` runs there.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    assert state.device.type == "cpu"


def base_model() -> Any:
    """A small Qwen2, no dimension of which divides by two ranks."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320, hidden_size=63, intermediate_size=135, num_hidden_layers=2, head_dim=32,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=False,
        name_or_path="tiny/base",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


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


if __name__ == "__main__":
    main()

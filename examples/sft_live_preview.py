"""Talk to a model while supervised training changes it.

    python examples/sft_live_preview.py --bucket-url s3://my-bucket/rl --run-id my-sft
    curl http://replica-1:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"model": "my-sft-v3", "messages": [{"role": "user", "content": "Hello"}]}'

Every 50 steps the adapter becomes the next version of the run, and every replica that follows the
bucket has it seconds later: my-sft-v1, my-sft-v2, … Training waits for a copy of the adapter only.

``python -m examples.sft_live_preview --tiny`` trains a model of two layers on a CPU, offline, into
a folder, and shows what a replica would find there.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen2.5-1.5B"
EVERY_STEPS = 50


def main() -> None:
    """Train, and publish."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket-url", help="s3://bucket/prefix, hf://… or file:///dir")
    parser.add_argument("--run-id", default="sft-preview", help="name of the run in the bucket")
    parser.add_argument("--model", help=f"default: {MODEL}")
    parser.add_argument("--server", help="a replica, to check before the first step that it fits")
    parser.add_argument("--tiny", action="store_true", help="a CPU, offline, two layers")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            _tiny(options, Path(scratch))
        return
    if not options.bucket_url:
        parser.error("--bucket-url is needed")
    from datasets import load_dataset

    train(
        options,
        options.model or MODEL,
        load_dataset("trl-lib/Capybara", split="train"),
        every_steps=EVERY_STEPS,
        settings={
            "output_dir": "out/sft-preview",
            "max_length": 2048,
            "packing": True,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "learning_rate": 2e-4,  # ten times that of full fine-tuning
            "max_steps": 1000,
            "bf16": True,
        },
    )


def train(
    options: argparse.Namespace,
    model: str,
    dataset: Any,
    *,
    every_steps: int,
    settings: dict[str, Any],
) -> None:
    """Plain TRL; the callback is all that is added."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from trl_async_bucket import BucketSyncCallback

    preview = BucketSyncCallback(
        options.bucket_url, options.run_id, every_steps=every_steps, server_url=options.server
    )
    SFTTrainer(
        model,
        args=SFTConfig(logging_steps=10, report_to=[], **settings),
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[preview],
    ).train()


def _tiny(options: argparse.Namespace, scratch: Path) -> None:
    from datasets import Dataset

    from adapter_bucket.fetch import RunReader
    from adapter_bucket.stores import open_store
    from demo.task import prompt_rows
    from demo.tiny_model import build

    bucket = scratch / "bucket"
    bucket.mkdir()
    options.bucket_url = options.bucket_url or bucket.as_uri()
    rows = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": "aaaa"}]}
        for row in prompt_rows()
    ]
    settings = {
        "output_dir": str(scratch / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "max_length": 128,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    model = options.model or str(build(scratch / "model", warm_up_steps=1))
    train(options, model, Dataset.from_list(rows), every_steps=2, settings=settings)
    manifest = RunReader(open_store(options.bucket_url), options.run_id).poll()
    assert manifest is not None
    for entry in manifest.versions:
        print(f"{options.run_id}-v{entry.version}: step {entry.step}, rank {entry.rank}")


if __name__ == "__main__":
    main()

"""``load_best_model_at_end``: the last version is the policy that the trainer ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.manifest import RunState, VersionEntry
from adapter_bucket.stores import open_store
from tests.integration.preemption.trainer import BucketTrainer, Config, Rows
from tests.unit.trl_async_bucket.models import tiny_peft_model
from tests.unit.trl_async_bucket.test_callback import callback, trainer
from trl_async_bucket.snapshot import lora_parameters

BEST = 2
SETTINGS: dict[str, Any] = {
    "max_steps": 5, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
    "eval_steps": 1, "load_best_model_at_end": True,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings(
    "ignore:Unable to fetch remote file", "ignore:Could not find a config file"
)


def best_at(one: Trainer, step: int) -> None:
    """Let the evaluation of one step be the best."""
    loop = one.evaluation_loop

    def canned(*args: Any, **kwargs: Any) -> Any:
        output = loop(*args, **kwargs)
        output.metrics["eval_loss"] = 1.0 if one.state.global_step == step else 2.0
        return output

    one.evaluation_loop = canned


def last_version(tmp_path: Path, run: str, model: Any) -> VersionEntry:
    """The newest version, which must hold the model's own weights."""
    store = open_store(f"file://{tmp_path}/bucket")
    manifest = RunReader(store, run).poll()
    assert manifest is not None
    assert manifest.state is RunState.FINISHED
    entry = manifest.versions[-1]
    folder = fetch_version(store, run, entry, tmp_path / "fetched")
    published = load_file(folder / "adapter_model.safetensors")
    own = lora_parameters(model, "default")
    assert all(torch.equal(published[name], own[name].detach()) for name in own)
    return entry


@pytest.mark.parametrize("best", [BEST, 5])
@pytest.mark.parametrize("every_steps", [1, 3])
def test_a_callbacks_last_version_is_the_best_model(
    tmp_path: Path, every_steps: int, best: int
) -> None:
    one = trainer(tmp_path, callback(tmp_path, every_steps=every_steps), **SETTINGS)
    best_at(one, best)
    one.train()
    assert last_version(tmp_path, "sft", one.model).step == best


@pytest.mark.parametrize("best", [BEST, 5])
def test_a_trainers_last_version_is_the_best_model(tmp_path: Path, best: int) -> None:
    config = Config(
        output_dir=str(tmp_path / "out"), bucket_url=f"file://{tmp_path}/bucket",
        bucket_run_id="run", bucket_grace_s=0, bucket_checkpoints=False, bucket_probe_every=0,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, **SETTINGS,
    )  # fmt: skip
    one = BucketTrainer(
        tiny_peft_model(), config, train_dataset=Rows(0.0), eval_dataset=[Rows(0.0)[0]]
    )
    best_at(one, best)
    one.train()
    entry = last_version(tmp_path, "run", one.model)
    assert entry.step == best
    assert entry.version == one.model_version == (7 if best == BEST else 6)

"""A drop-in trainer with another ``weight_sync`` than ``"bucket"`` is the trainer behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from tests.integration.preemption.trainer import Rows
from tests.unit.trl_async_bucket.models import tiny_peft_model
from trl_async_bucket.compat import cpu_ranks
from trl_async_bucket.training_run import TrainingRun

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unable to fetch remote file", "ignore:Could not find a config file"
)


class PlainTrainer(TrainingRun, Trainer):  # type: ignore[misc]
    """As the drop-ins are while nothing asks for the bucket."""


def trainer(output_dir: Path, **changes: Any) -> PlainTrainer:
    config = TrainingArguments(
        output_dir=str(output_dir), save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        **changes,
    )  # fmt: skip
    return PlainTrainer(tiny_peft_model(), config, train_dataset=Rows(0.0))


def test_a_checkpoint_folder_named_bucket_is_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(tmp_path / "out", max_steps=1).train()
    (tmp_path / "out/checkpoint-1").rename("bucket")
    (tmp_path / "out").rename("before")
    again = trainer(tmp_path / "out", max_steps=2)
    again.train("bucket")
    assert [saved.name for saved in (tmp_path / "out").iterdir()] == ["checkpoint-2"]


def test_how_torch_loads_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ranks, "_installed", False)
    trainer(tmp_path / "out", max_steps=1).train()
    assert not cpu_ranks._installed

"""``GRPOTrainer`` generates outside of training, too, and claims its run for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.manifest import RunState
from adapter_bucket.stores import open_store
from tests.unit.trl_async_bucket.models import status_server, tiny_peft_model
from tests.unit.trl_async_bucket.sync_bench import make_sync, read_manifest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.parametrize("in_training", [False, True])
def test_completions_outside_of_training_leave_no_run_running(
    tmp_path: Path, name: str, in_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl_async_bucket.grpo import GRPOTrainer, TrlGRPOTrainer

    def generates(trainer: Any) -> None:
        trainer._bucket.start()

    monkeypatch.setattr(TrlGRPOTrainer, name, generates)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer._uses_bucket, trainer._in_training = True, in_training
    with status_server() as server:
        server.store = open_store(f"file://{tmp_path}/bucket")
        trainer._bucket = make_sync(server, tiny_peft_model(), tmp_path)
        getattr(trainer, name)()
        expected = RunState.RUNNING if in_training else RunState.INTERRUPTED
        assert read_manifest(server).state is expected

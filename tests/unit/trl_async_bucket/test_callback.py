"""The callback in a real ``transformers.Trainer`` on a tiny model, over a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, FencedError
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.manifest import Manifest, RunState
from adapter_bucket.stores import open_store
from tests.unit.trl_async_bucket.models import tiny_peft_model


def trainer(tmp_path: Path, callback: Any, *, model: Any = None, **changes: Any) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(64, (8,))} for _ in range(16)]
    for row in rows:
        row["labels"] = row["input_ids"]
    settings = {
        "output_dir": str(tmp_path / "out"), "max_steps": 5, "per_device_train_batch_size": 2,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "learning_rate": 1e-2, **changes,
    }  # fmt: skip
    return Trainer(
        model or tiny_peft_model(), TrainingArguments(**settings), train_dataset=rows,
        eval_dataset=rows[:2], callbacks=[callback],
    )  # fmt: skip


def callback(tmp_path: Path, **settings: Any) -> Any:
    from trl_async_bucket import BucketSyncCallback

    return BucketSyncCallback(f"file://{tmp_path}/bucket", "sft", **settings)


def manifest(tmp_path: Path) -> Manifest:
    found = RunReader(open_store(f"file://{tmp_path}/bucket"), "sft").poll()
    assert found is not None
    return found


def test_every_n_steps_and_the_last_one_are_published(tmp_path: Path) -> None:
    one = trainer(tmp_path, callback(tmp_path, every_steps=2, keep_every=1))
    one.train()
    found = manifest(tmp_path)
    assert [entry.step for entry in found.versions][-1] == 5
    assert {entry.step for entry in found.versions} <= {2, 4, 5}
    assert found.state is RunState.FINISHED
    last = [row["bucket/version"] for row in one.state.log_history if "bucket/version" in row][-1]
    assert last == found.latest


@pytest.mark.filterwarnings(
    "ignore:Unable to fetch remote file", "ignore:Could not find a config file"
)
def test_what_is_published_is_what_peft_saves_of_that_step(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = tiny_peft_model()
    trainer(tmp_path, callback(tmp_path, every_steps=5), model=model).train()
    model.save_pretrained(tmp_path / "peft")
    entry = manifest(tmp_path).versions[-1]
    store = open_store(f"file://{tmp_path}/bucket")
    folder = fetch_version(store, "sft", entry, tmp_path / "fetched")
    ours = load_file(folder / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_a_better_evaluation_is_published(tmp_path: Path) -> None:
    used = callback(tmp_path, on_improvement=True, keep_every=1)
    one = trainer(tmp_path, used, eval_strategy="steps", eval_steps=1)
    losses = iter([3.0, 2.0, 2.5, 1.0, 1.5])
    evaluate = one.evaluation_loop

    def canned(*args: Any, **kwargs: Any) -> Any:
        output = evaluate(*args, **kwargs)
        output.metrics["eval_loss"] = next(losses)
        return output

    one.evaluation_loop = canned
    one.train()
    assert used.version == 3
    assert manifest(tmp_path).versions[-1].step == 4


@pytest.mark.filterwarnings(
    "ignore:Unable to fetch remote file", "ignore:Could not find a config file"
)
def test_what_was_best_before_a_resume_still_is(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 2.5, 2.0, 0.5])
    settings: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    published = []
    for steps in (2, 5):
        used = callback(tmp_path, on_improvement=True, keep_every=1)
        one = trainer(tmp_path, used, max_steps=steps, **settings)
        loop = one.evaluation_loop

        def canned(*args: Any, loop: Any = loop, **kwargs: Any) -> Any:
            output = loop(*args, **kwargs)
            output.metrics["eval_loss"] = next(losses)
            return output

        one.evaluation_loop = canned
        one.train(resume_from_checkpoint=steps > 2 or None)
        published += [entry.step for entry in manifest(tmp_path).versions]
    assert sorted(set(published)) == [1, 2, 5]


def test_a_run_goes_on_counting_and_a_second_trainer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, callback(tmp_path, every_steps=5)).train()
    trainer(tmp_path, callback(tmp_path, every_steps=5)).train()
    assert manifest(tmp_path).latest == 2
    from adapter_bucket.publish import RunWriter

    base = manifest(tmp_path).base_model
    store = open_store(f"file://{tmp_path}/bucket")
    RunWriter.claim(store, "sft", base_model=base, window=2, writer_id="another")
    with pytest.raises(FencedError):
        trainer(tmp_path, callback(tmp_path, every_steps=5)).train()


def test_a_run_that_fails_is_not_left_running(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("out of memory")

    used = callback(tmp_path, every_steps=1)
    one = trainer(tmp_path, used)
    one.add_callback(Fails())
    with pytest.raises(RuntimeError, match="out of memory"):
        one.train()
    used._interrupt()  # what the end of the process does
    assert manifest(tmp_path).state is RunState.INTERRUPTED


def test_a_run_that_failed_is_gone_on_with_in_the_same_process(tmp_path: Path) -> None:
    """As in a notebook: the callback itself still has the run."""
    from transformers import TrainerCallback

    class FailsOnce(TrainerCallback):  # type: ignore[misc]
        failed = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("out of memory")

    one = trainer(tmp_path, callback(tmp_path, every_steps=1, keep_every=1))
    one.add_callback(FailsOnce())
    with pytest.raises(RuntimeError, match="out of memory"):
        one.train()
    one.train()
    found = manifest(tmp_path)
    assert found.state is RunState.FINISHED
    assert found.writer.epoch == 2
    assert found.versions[-1].step == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "every_steps=N or on_improvement=True"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"every_steps": 1, "window": 0}, "window=0"),
    ],
)
def test_a_callback_that_could_not_work_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        callback(tmp_path, **settings)


def test_a_model_without_adapter_is_refused_before_the_first_step(tmp_path: Path) -> None:
    base = tiny_peft_model().unload()
    with pytest.raises(ConfigError, match="peft_config"):
        trainer(tmp_path, callback(tmp_path, every_steps=1), model=base).train()


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    used = callback(tmp_path, on_improvement=True)
    one = trainer(
        tmp_path, used, eval_strategy="steps", eval_steps=1, metric_for_best_model="accuracy"
    )
    with pytest.raises(ConfigError, match=r"'eval_accuracy'.*eval_loss"):
        one.train()
    used._interrupt()


def test_its_arguments_are_flags_and_yaml_keys_of_a_script(tmp_path: Path) -> None:
    """Two versions by a callback that was made from them, beside transformers' own arguments."""
    from transformers import TrainingArguments
    from trl import TrlParser

    from trl_async_bucket import BucketSyncArguments

    yaml = tmp_path / "sft.yaml"
    yaml.write_text(f"bucket_url: file://{tmp_path}/bucket\nbucket_every_steps: 1\nmax_steps: 9\n")
    flags = ["--config", str(yaml), "--bucket_run_id", "sft", "--bucket_every_steps", "3"]
    flags += ["--bucket_keep_every", "1", "--report_to", "none", "--use_cpu"]
    parser = TrlParser([TrainingArguments, BucketSyncArguments])
    args, bucket = parser.parse_args_and_config(flags)
    assert args.max_steps == 9
    (made,) = bucket.callbacks()
    trainer(tmp_path, made).train()
    assert [entry.step for entry in manifest(tmp_path).versions][-1] == 5
    assert manifest(tmp_path).latest == 2
    assert BucketSyncArguments().callbacks() == []
    with pytest.raises(ConfigError, match="need bucket_url"):
        BucketSyncArguments(bucket_every_steps=5).callbacks()

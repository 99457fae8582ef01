"""A run's way through a real folder bucket; only vLLM is missing, see ``StatusServer``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, FencedError, NotPublished
from adapter_bucket.fetch import fetch_version
from adapter_bucket.manifest import RunState
from tests.unit.trl_async_bucket.models import (
    StatusServer,
    tiny_peft_model,
    train_one_step,
)
from tests.unit.trl_async_bucket.sync_bench import make_sync, publish, read_manifest
from trl_async_bucket.snapshot import lora_parameters


def test_a_run_is_published_version_by_version_and_finished(
    server: StatusServer, tmp_path: Path
) -> None:
    model = tiny_peft_model()
    ready: list[int] = []
    sync = make_sync(server, model, tmp_path, ready)
    sync.start()
    assert publish(sync, 5, model) == [1, 2, 3, 4, 5]
    sync.finish()
    assert ready == [1, 2, 3, 4, 5]
    manifest = read_manifest(server)
    assert manifest.state is RunState.FINISHED
    assert manifest.latest == 5


def test_what_is_in_the_bucket_is_a_plain_peft_adapter(
    server: StatusServer, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import Qwen2ForCausalLM

    model = tiny_peft_model(target_modules=r".*\.(q|v)_proj")
    sync = make_sync(server, model, tmp_path)
    sync.start()
    publish(sync, 1, model)
    sync.take(lora_parameters(model, "default"), version=2, step=1)
    sync.finish()
    assert server.store is not None
    entry = read_manifest(server).versions[-1]
    folder = fetch_version(server.store, "run", entry, tmp_path / "cache")
    base = Qwen2ForCausalLM(model.config)
    base.load_state_dict(
        {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
            for name, tensor in model.state_dict().items()
            if "lora_" not in name
        }
    )
    ids = torch.arange(8).unsqueeze(0)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_a_second_start_goes_on_counting(server: StatusServer, tmp_path: Path) -> None:
    model = tiny_peft_model()
    sync = make_sync(server, model, tmp_path)
    sync.start()
    publish(sync, 2, model)
    sync.finish()
    again = make_sync(server, model, tmp_path)
    again.start()
    assert publish(again, 2, model) == [3, 4]
    again.finish()
    assert read_manifest(server).writer.epoch == 2


def test_an_interrupted_run_says_so_and_can_be_taken_up(
    server: StatusServer, tmp_path: Path
) -> None:
    model = tiny_peft_model()
    sync = make_sync(server, model, tmp_path)
    sync.start()
    publish(sync, 1, model)
    sync.interrupt()
    sync.interrupt()  # a second time does nothing
    assert read_manifest(server).state is RunState.INTERRUPTED
    make_sync(server, model, tmp_path).start()


def test_a_running_run_is_not_taken_without_being_asked_to(
    server: StatusServer, tmp_path: Path
) -> None:
    model = tiny_peft_model()
    first = make_sync(server, model, tmp_path)
    first.start()
    publish(first, 1, model)
    with pytest.raises(FencedError, match="running"):
        make_sync(server, model, tmp_path).start()
    second = make_sync(server, model, tmp_path, takeover=True)
    second.start()
    first.take(lora_parameters(model, "default"), version=2, step=1)
    with pytest.raises(FencedError):
        first.wait_lag(0)
    assert publish(second, 1, model) == [2]
    second.finish()


def test_a_damaged_version_is_followed_by_its_weights_under_the_next_number(
    server: StatusServer, tmp_path: Path
) -> None:
    model = tiny_peft_model()
    ready: list[int] = []
    sync = make_sync(server, model, tmp_path, ready)
    sync.start()
    publish(sync, 1, model)
    server.damaged = {"run-v2"}
    publish(sync, 1, model)
    assert (sync.taken_version, sync.next_version, sync.lag, sync.passed_over) == (3, 4, 0, 1)
    first, damaged, again = read_manifest(server).versions
    assert damaged.weights.sha256 == again.weights.sha256 != first.weights.sha256
    assert damaged.step == again.step
    assert publish(sync, 1, model) == [4]
    sync.finish()
    assert ready == [1, 3, 4]


def test_nothing_is_written_before_start(server: StatusServer, tmp_path: Path) -> None:
    make_sync(server, tiny_peft_model(), tmp_path)
    with pytest.raises(NotPublished):
        read_manifest(server)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model": "someone/else"}, "bucket_base_model"),
        ({"window": 9}, "--max-loras 10"),
        ({"bucket_url": "gopher://x"}, "gopher"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    server: StatusServer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sync(server, tiny_peft_model(), tmp_path, **changes)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 16}, "--max-lora-rank 16"),
        ({"r": 4, "rank_pattern": {"q_proj": 32}}, "rank"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_at_once(
    server: StatusServer, tmp_path: Path, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sync(server, tiny_peft_model(**lora), tmp_path)


def test_a_policy_of_two_adapters_is_refused(server: StatusServer, tmp_path: Path) -> None:
    model = tiny_peft_model()
    model.add_adapter("other", model.peft_config["default"])
    make_sync(server, model, tmp_path)  # beside the active one, as TRL's reference
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"'other'.*only 'default'.*set_adapter\('default'\)"):
        make_sync(server, model, tmp_path)


def test_an_inactive_adapter_on_other_modules_does_not_count(
    server: StatusServer, tmp_path: Path
) -> None:
    from peft import LoraConfig

    model = tiny_peft_model(target_modules=r".*\.(q|v)_proj")
    model.add_adapter("other", LoraConfig(r=4, target_modules=["down_proj"]))
    sync = make_sync(server, model, tmp_path)
    sync.start()
    publish(sync, 1, model)
    sync.finish()
    targets = read_manifest(server).versions[-1].adapter_config["target_modules"]
    assert len(targets) == 4
    assert all(name.endswith(("q_proj", "v_proj")) for name in targets)


def test_no_thread_outlives_a_run(server: StatusServer, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = tiny_peft_model()
    sync = make_sync(server, model, tmp_path)
    sync.start()
    publish(sync, 1, model)
    sync.finish()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "bucket-publisher"]


def test_an_adapter_without_effect_yet_is_published_as_the_untrained_policy(
    server: StatusServer, tmp_path: Path
) -> None:
    """A learning-rate warm-up, or rewards without spread, leave B at zero after a step."""
    import torch

    model = tiny_peft_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    sync = make_sync(server, model, tmp_path)
    sync.start()
    for step in (0, 1):
        sync.take(lora_parameters(model, "default"), version=step + 1, step=step)
        sync.wait_lag(0)
    train_one_step(model)
    sync.take(lora_parameters(model, "default"), version=3, step=2)
    sync.finish()
    assert [entry.step for entry in read_manifest(server).versions] == [0, 0, 2]

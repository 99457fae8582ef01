"""Settings that cannot work are refused before the first step, by the real replica's answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.ready_policy import ANY
from demo.fleet import MAX_LORAS
from tests.integration.loop.conftest import Fleet
from trl_async_bucket.settings import SyncSettings
from trl_async_bucket.sync import BucketSync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def sync_for(
    fleet: Fleet,
    *,
    lora: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    bucket: str | None = None,
    window: int = 6,
    base_model: str | None = None,
) -> BucketSync:
    """What the trainer's constructor builds, for one adapter and the running fleet."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.from_pretrained(fleet.model, **(config or {}))
    model = AutoModelForCausalLM.from_config(model_config)
    peft_config = LoraConfig(**{"r": 8, "target_modules": ["q_proj"], **(lora or {})})
    settings = SyncSettings(
        bucket_url=bucket or fleet.bucket,
        run_id="refused",
        dtype="auto",
        ready=ANY,
        max_lag=3,
        base_model=base_model,
        window=window,
        server_url=fleet.proxy.url,
        timeout_s=10,
    )
    return BucketSync(
        get_peft_model(model, peft_config), "default", settings, on_ready=lambda _version: None
    )


@pytest.fixture(autouse=True)
def _credentials(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fleet.env.items():
        monkeypatch.setenv(name, value)


def test_good_input_is_accepted(fleet: Fleet) -> None:
    sync_for(fleet)


def test_an_unknown_scheme_is_named_with_the_known_ones(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"ftp.*s3://"):
        sync_for(fleet, bucket="ftp://host/dir")


def test_a_missing_bucket_is_named(fleet: Fleet) -> None:
    wrong = re.sub(r"s3://[^/]+/", "s3://no-such-bucket-here/", fleet.bucket)
    with pytest.raises(ConfigError, match=r"no-such-bucket-here.*does not exist"):
        sync_for(fleet, bucket=wrong)


def test_a_missing_folder_is_named(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        sync_for(fleet, bucket=f"file://{tmp_path}/a/b")


def test_missing_credentials_are_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(ConfigError, match=r"credentials.*AWS_ACCESS_KEY_ID"):
        sync_for(fleet)


def test_another_base_model_is_refused_by_name_and_by_shape(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"another-model.*bucket_base_model"):
        sync_for(fleet, base_model="someone/another-model")
    with pytest.raises(ConfigError, match="shapes"):
        sync_for(fleet, config={"intermediate_size": 384}, base_model=str(fleet.model))


def test_too_high_a_rank_names_the_flag(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"--max-lora-rank 8.*--max-lora-rank 16"):
        sync_for(fleet, lora={"r": 12})


def test_too_few_slots_name_the_flag(fleet: Fleet) -> None:
    window = MAX_LORAS + 1
    with pytest.raises(ConfigError, match=rf"--max-loras {MAX_LORAS}.*--max-loras {window + 1}"):
        sync_for(fleet, window=window)


@pytest.mark.parametrize(
    ("field", "lora"),
    [
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("use_dora", {"use_dora": True}),
        ("bias", {"bias": "lora_only"}),
        ("lm_head", {"target_modules": ["q_proj", "lm_head"]}),
        ("embed_tokens", {"target_modules": ["q_proj", "embed_tokens"]}),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_field(
    fleet: Fleet, field: str, lora: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=field):
        sync_for(fleet, lora=lora)


def test_the_trainer_itself_stops_before_its_first_step(fleet: Fleet) -> None:
    """The same through the trainer's command line: exit code, and one clear last line."""
    with fleet.trainer("refused", "--lora-rank", "12", steps=5) as trainer:
        trainer.process.wait(120)
    assert trainer.process.returncode != 0
    text = trainer.log_path.read_text(errors="replace")
    assert "--max-lora-rank 16" in text
    assert fleet.metrics("refused") == []

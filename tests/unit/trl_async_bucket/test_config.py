from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, UnsupportedUpstream

# TRL says at import that its experimental trainers may change: known, and pinned.
pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")


def config(tmp_path: Path, **changes: Any) -> Any:
    from trl_async_bucket.async_grpo import AsyncGRPOConfig

    settings = {
        "output_dir": str(tmp_path / "my run!"),
        "bucket_url": "s3://b/p",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        **changes,
    }
    return AsyncGRPOConfig(**settings)


def test_the_default_run_id_is_valid_readable_and_new_each_time(tmp_path: Path) -> None:
    first, second = (config(tmp_path).bucket_run_id for _ in range(2))
    assert first.startswith("my-run-")
    assert first != second


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_sync": "nccl"}, ("weight_sync='nccl'", "bucket")),
        ({"bucket_url": None}, ("bucket_url", "s3://")),
        ({"bucket_dtype": "int8"}, ("bucket_dtype='int8'", "bfloat16")),
        ({"bucket_ready": "most"}, ("bucket_ready='most'", "any")),
        ({"bucket_max_lag": 0}, ("bucket_max_lag=0", "at least 1")),
        ({"bucket_max_lag": 9}, ("bucket_max_lag=9", "max_staleness=4")),
        ({"bucket_keep_every": -2}, ("bucket_keep_every=-2", "0: none")),
        ({"bucket_probe_every": -1}, ("bucket_probe_every=-1", "0: none")),
        ({"bucket_ready_via": "mail"}, ("bucket_ready_via='mail'", "heartbeats")),
        ({"bucket_ready_via": "heartbeats"}, ("bucket_dtype='auto'", "bfloat16")),
        ({"bucket_run_id": "../up"}, ("bucket_run_id", "'../up'")),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_remedy(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("max_staleness", "max_lag"), [(0, 1), (1, 1), (4, 3)])
def test_lag_may_come_close_to_the_staleness_that_drops_everything(
    tmp_path: Path, max_staleness: int, max_lag: int
) -> None:
    assert config(tmp_path, max_staleness=max_staleness).lag_limit(max_staleness) == max_lag


def test_with_trls_own_sync_the_bucket_fields_are_not_looked_at(tmp_path: Path) -> None:
    args = config(tmp_path, weight_sync="trl", bucket_url=None, bucket_dtype="?")
    assert args.bucket_run_id is None


def test_the_fields_are_flags_of_a_script(tmp_path: Path) -> None:
    from trl import TrlParser

    from trl_async_bucket.async_grpo import AsyncGRPOConfig

    arguments = [
        "--output_dir", str(tmp_path), "--bucket_url", "file:///b", "--bucket_run_id", "r1",
        "--use_cpu", "--bf16", "false", "--report_to", "none",
    ]  # fmt: skip
    (args,) = TrlParser([AsyncGRPOConfig]).parse_args_and_config(arguments)
    assert (args.bucket_url, args.bucket_run_id) == ("file:///b", "r1")


def test_trls_own_config_class_is_refused_by_the_trainer(tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig as TrlConfig

    from trl_async_bucket.async_grpo import AsyncGRPOTrainer

    args = TrlConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"trl_async_bucket\.AsyncGRPOConfig"):
        AsyncGRPOTrainer("model", args=args)


def test_the_installed_trl_has_the_seam_and_other_classes_do_not() -> None:
    from trl_async_bucket.compat.async_grpo import check_seam, import_trl
    from trl_async_bucket.compat.seam import TESTED_TRL

    check_seam(import_trl()[1])

    class Renamed:
        def _init_lora_sync(self, model: object) -> None: ...

    class OtherSignature(import_trl()[1]):  # type: ignore[misc]
        def _sync_weight(self, force: bool) -> None: ...

    class OtherConstructor(import_trl()[1]):  # type: ignore[misc]
        def __init__(self) -> None: ...

    for unknown in (Renamed, OtherSignature, OtherConstructor):
        with pytest.raises(UnsupportedUpstream, match=f"trl=={TESTED_TRL[0]}"):
            check_seam(unknown)

"""The fields about checkpoints and preemption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError
from trl_async_bucket.__main__ import parser
from trl_async_bucket.checkpoint_config import DEFAULT_LIMIT
from trl_async_bucket.config import BucketSyncFields


@dataclass
class Arguments(BucketSyncFields):
    """The bucket's fields beside a few of transformers'."""

    save_total_limit: int | None = None
    enable_jit_checkpoint: bool = False


def arguments(tmp_path: Path, **changes: Any) -> Arguments:
    made = Arguments(bucket_url=tmp_path.as_uri(), **changes)
    made.check_bucket_fields(output_dir=str(tmp_path))
    return made


def test_as_many_checkpoints_stay_as_locally(tmp_path: Path) -> None:
    assert arguments(tmp_path).checkpoint_limit == DEFAULT_LIMIT == 2
    assert arguments(tmp_path, save_total_limit=5).checkpoint_limit == 5
    assert arguments(tmp_path, save_total_limit=5, bucket_checkpoint_limit=1).checkpoint_limit == 1


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"bucket_checkpoint_limit": 0}, ("bucket_checkpoint_limit=0", "bucket_checkpoints=False")),
        ({"bucket_grace_s": -1.0}, ("bucket_grace_s=-1.0", "0 leaves SIGTERM alone")),
        ({"enable_jit_checkpoint": True}, ("enable_jit_checkpoint=True", "bucket_grace_s=0")),
    ],
)
def test_a_wrong_field_is_named_with_the_remedy(
    tmp_path: Path, changes: dict[str, Any], texts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, **changes)
    for text in texts:
        assert text in str(caught.value)


def test_transformers_own_handler_is_taken_where_ours_is_off(tmp_path: Path) -> None:
    arguments(tmp_path, enable_jit_checkpoint=True, bucket_grace_s=0.0)


def test_only_a_run_id_that_was_chosen_can_be_resumed(tmp_path: Path) -> None:
    assert arguments(tmp_path, bucket_run_id="mine").bucket_run_id_given
    made = arguments(tmp_path)
    assert made.bucket_run_id is not None
    assert not made.bucket_run_id_given


def test_checkpoints_can_be_switched_off_from_the_command_line() -> None:
    options = parser().parse_args(["run", "--no-bucket-checkpoints", "train.py"])
    assert options.bucket_checkpoints is False
    assert "bucket_grace_s" not in options  # what is not given stays the config's default
    assert parser().parse_args(["run", "--bucket-grace-s", "9", "x.py"]).bucket_grace_s == 9.0

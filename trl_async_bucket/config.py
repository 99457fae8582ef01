"""The trainer's settings: TRL's config classes with a few ``bucket_*`` fields."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id
from trl_async_bucket.compat.async_grpo import import_trl

TrlAsyncGRPOConfig: Any = import_trl()[0]

WEIGHT_SYNCS = ("trl", "bucket")
READY_POLICIES = ("any", "all")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class BucketSyncFields:
    """Fields added to a TRL config. With ``weight_sync="trl"`` they change nothing."""

    weight_sync: str = field(
        default="bucket",
        metadata={
            "help": "'bucket' publishes the LoRA adapter to `bucket_url`; 'trl' leaves TRL's own "
            "weight sync as it is.",
            "choices": list(WEIGHT_SYNCS),
        },
    )
    bucket_url: str | None = field(
        default=None,
        metadata={"help": "Where versions are published: s3://bucket/prefix or file:///dir."},
    )
    bucket_run_id: str | None = field(
        default=None,
        metadata={
            "help": "Name of the run in the bucket, and of the adapters: <run_id>-v<N>. By default "
            "made of the output directory's name, the time and a random part, so that no two runs "
            "meet."
        },
    )
    bucket_takeover: bool = field(
        default=False,
        metadata={
            "help": "Take over `bucket_run_id` although it is marked running (its trainer was "
            "killed). Its old trainer, if alive after all, fails at its next publish. Version "
            "numbers go on from the bucket."
        },
    )
    bucket_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the published adapter. 'auto' takes the one the replicas serve in: "
            "half the bytes of float32 for a bfloat16 server, and the same served weights.",
            "choices": list(DTYPES),
        },
    )
    bucket_ready: str = field(
        default="any",
        metadata={
            "help": "On how many replicas a version must be ready before rollouts ask for it. "
            "'any' suffices behind the proxy, which sends a request only where its version is "
            "ready.",
            "choices": list(READY_POLICIES),
        },
    )
    bucket_max_lag: int = field(
        default=-1,
        metadata={
            "help": "How many versions the newest snapshot may be ahead of the newest ready "
            "version before the trainer waits. Lag is staleness that every new rollout starts "
            "with. -1 means `max_staleness - 1`, at least 1: one version below where all rollouts "
            "would be dropped."
        },
    )
    bucket_keep_every: int = field(
        default=0,
        metadata={"help": "Never delete versions divisible by this from the bucket; 0: none."},
    )
    bucket_base_model: str | None = field(
        default=None,
        metadata={
            "help": "Name of the base model as the replicas serve it, where it differs from the "
            "trainer's in its last path component."
        },
    )

    def check_bucket_fields(self, *, max_staleness: int, output_dir: str | None) -> None:
        """Check the fields and fill in the run id.

        Raises:
            ConfigError: names the field, its value and what to write instead.
        """
        _check_choice("weight_sync", self.weight_sync, WEIGHT_SYNCS)
        if self.weight_sync != "bucket":
            return
        _check_choice("bucket_dtype", self.bucket_dtype, DTYPES)
        _check_choice("bucket_ready", self.bucket_ready, READY_POLICIES)
        if not self.bucket_url:
            raise ConfigError(
                "weight_sync='bucket' needs bucket_url: s3://bucket/prefix or file:///dir"
            )
        if self.bucket_max_lag == -1:
            self.bucket_max_lag = max(max_staleness - 1, 1)
        if self.bucket_max_lag < 1:
            raise ConfigError(f"bucket_max_lag={self.bucket_max_lag} must be at least 1")
        if self.bucket_max_lag > max(max_staleness, 1):
            raise ConfigError(
                f"bucket_max_lag={self.bucket_max_lag} is above max_staleness={max_staleness}: "
                "every rollout would be dropped as stale before the trainer waits. Lower "
                "bucket_max_lag or raise max_staleness"
            )
        if self.bucket_keep_every < 0:
            raise ConfigError(
                f"bucket_keep_every={self.bucket_keep_every} must not be negative; 0 keeps none"
            )
        if self.bucket_run_id is None:
            self.bucket_run_id = _new_run_id(output_dir)
        try:
            check_run_id(self.bucket_run_id)
        except ConfigError as error:
            raise ConfigError(f"bucket_run_id: {error}") from None


@dataclass
class AsyncGRPOConfig(BucketSyncFields, TrlAsyncGRPOConfig):  # type: ignore[misc]
    """TRL's ``AsyncGRPOConfig`` with bucket weight sync.

    All of TRL's fields keep their meaning. ``weight_sync_timeout`` (seconds) also limits how long
    the trainer waits for a version to become ready, and for the bucket, before it raises.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_bucket_fields(max_staleness=self.max_staleness, output_dir=self.output_dir)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _new_run_id(output_dir: str | None) -> str:
    """``<output dir name>-<UTC time>-<random>``, shortened to stay a valid run id."""
    stem = Path(output_dir or "run").resolve().name
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
    clean = clean.strip("._-")[:40].rstrip("._-") or "run"
    return f"{clean}-{time.strftime('%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"

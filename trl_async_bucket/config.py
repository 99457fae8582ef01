"""The ``bucket_*`` fields that the drop-ins add to TRL's config classes. Imports no TRL."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id
from adapter_bucket.ready_policy import ReadyPolicy
from trl_async_bucket.checkpoint_config import BucketCheckpointFields
from trl_async_bucket.settings import SyncSettings

WEIGHT_SYNCS = ("trl", "bucket")
READY_SOURCES = ("status", "heartbeats")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class BucketSyncFields(BucketCheckpointFields):
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
            "help": "On how many replicas a version must be ready before rollouts ask for it: "
            "'any', 'all', 'quorum:N', or 'none' (as soon as it is published). 'any' suffices "
            "behind the proxy, which sends a request only where its version is ready.",
        },
    )
    bucket_ready_via: str = field(
        default="status",
        metadata={
            "help": "How the trainer learns what is ready. 'status' asks the replicas or the proxy "
            "over HTTP and knows within one round trip; 'heartbeats' reads what the replicas "
            "write into the bucket, for servers whose /bucket_lora/status cannot be reached.",
            "choices": list(READY_SOURCES),
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
    bucket_probe_every: int = field(
        default=100,
        metadata={
            "help": "The first two versions of a start and then every N-th carry a probe: 32 "
            "tokens with the trainer's own logprobs, which a replica must compute before it says "
            "ready. Costs the trainer one short forward pass. 0: no probes."
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

    def check_bucket_fields(self, *, output_dir: str | None) -> None:
        """Check the fields and fill in the run id.

        Raises:
            ConfigError: names the field, its value and what to write instead.
        """
        _check_choice("weight_sync", self.weight_sync, WEIGHT_SYNCS)
        if self.weight_sync != "bucket":
            return
        _check_choice("bucket_dtype", self.bucket_dtype, DTYPES)
        _check_choice("bucket_ready_via", self.bucket_ready_via, READY_SOURCES)
        ReadyPolicy.parse(self.bucket_ready)
        if not self.bucket_url:
            raise ConfigError(
                "weight_sync='bucket' needs bucket_url: s3://bucket/prefix or file:///dir"
            )
        if self.bucket_ready_via == "heartbeats" and self.bucket_dtype == "auto":
            raise ConfigError(
                "bucket_dtype='auto' asks the replicas over HTTP; with "
                "bucket_ready_via='heartbeats' write the dtype they serve in, for example "
                "bucket_dtype='bfloat16'"
            )
        for name in ("bucket_keep_every", "bucket_probe_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative; 0: none")
        self.check_checkpoint_fields()
        self.bucket_run_id_given = self.bucket_run_id is not None
        if self.bucket_run_id is None:
            self.bucket_run_id = new_run_id(output_dir)
        try:
            check_run_id(self.bucket_run_id)
        except ConfigError as error:
            raise ConfigError(f"bucket_run_id: {error}") from None

    def sync_settings(
        self, *, window: int, max_lag: int, server_url: str, timeout_s: float
    ) -> SyncSettings:
        """The checked fields with what TRL's own fields add."""
        assert self.bucket_url is not None
        assert self.bucket_run_id is not None
        return SyncSettings(
            bucket_url=self.bucket_url,
            run_id=self.bucket_run_id,
            ready=ReadyPolicy.parse(self.bucket_ready),
            ready_via=self.bucket_ready_via,
            window=window,
            max_lag=max_lag,
            timeout_s=timeout_s,
            server_url=server_url,
            takeover=self.bucket_takeover,
            dtype=self.bucket_dtype,
            keep_every=self.bucket_keep_every,
            base_model=self.bucket_base_model,
        )

    def lag_limit(self, max_staleness: int) -> int:
        """``bucket_max_lag``, its default filled in and checked against ``max_staleness``.

        Raises:
            ConfigError: it is below 1, or so large that every rollout would be dropped.
        """
        if self.bucket_max_lag == -1:
            return max(max_staleness - 1, 1)
        if self.bucket_max_lag < 1:
            raise ConfigError(f"bucket_max_lag={self.bucket_max_lag} must be at least 1")
        if self.bucket_max_lag > max(max_staleness, 1):
            raise ConfigError(
                f"bucket_max_lag={self.bucket_max_lag} is above max_staleness={max_staleness}: "
                "every rollout would be dropped as stale before the trainer waits. Lower "
                "bucket_max_lag or raise max_staleness"
            )
        return self.bucket_max_lag


NEEDS_ADAPTER = (
    "weight_sync='bucket' publishes LoRA adapters: pass peft_config=LoraConfig(…) or a PeftModel, "
    "or set weight_sync='trl'"
)


def uses_bucket(args: object, config: type[BucketSyncFields]) -> bool:
    """Whether the ``args`` of a drop-in trainer ask for the bucket; ``None`` leaves TRL as it is.

    Raises:
        ConfigError: they are of another class than the drop-in's own: TRL's lacks the fields.
    """
    if args is None:
        return False
    if not isinstance(args, config):
        raise ConfigError(
            f"args is a {type(args).__name__}: pass trl_async_bucket.{config.__name__}, with "
            "weight_sync='trl' for TRL's own sync"
        )
    return args.weight_sync == "bucket"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}")


def new_run_id(output_dir: str | None) -> str:
    """``<output dir name>-<UTC time>-<random>``, shortened to stay a valid run id."""
    stem = Path(output_dir or "run").resolve().name
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
    clean = clean.strip("._-")[:40].rstrip("._-") or "run"
    return f"{clean}-{time.strftime('%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"

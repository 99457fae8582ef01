"""``BucketSyncCallback``'s arguments as flags and YAML keys. Imports no TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapter_bucket.errors import ConfigError
from trl_async_bucket.config import DTYPES

if TYPE_CHECKING:
    from trl_async_bucket.callback import BucketSyncCallback

PREVIEW_WINDOW = 2
"""Versions replicas keep ready: the newest, and the one that somebody may still be looking at."""


@dataclass
class BucketSyncArguments:
    """One more dataclass for ``TrlParser`` (or ``HfArgumentParser``) of a supervised script.

    Without ``bucket_url`` nothing is published: ``callbacks()`` is empty then.
    """

    bucket_url: str | None = field(
        default=None,
        metadata={"help": "Where versions are published: s3://bucket/prefix or file:///dir."},
    )
    bucket_run_id: str | None = field(
        default=None,
        metadata={"help": "Name of the run; by default made of the output directory's name."},
    )
    bucket_every_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps between two versions."}
    )
    bucket_on_improvement: bool = field(
        default=False,
        metadata={"help": "Publish when an evaluation improves `metric_for_best_model`."},
    )
    bucket_server_url: str | None = field(
        default=None,
        metadata={"help": "A replica or the proxy, to check before the first step."},
    )
    bucket_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype on the wire; 'auto': what the server serves in, or the model's own.",
            "choices": list(DTYPES),
        },
    )
    bucket_base_model: str | None = field(
        default=None, metadata={"help": "Name of the base model as the replicas serve it."}
    )
    bucket_window: int = field(
        default=PREVIEW_WINDOW, metadata={"help": "Versions that replicas keep ready."}
    )
    bucket_keep_every: int = field(
        default=0, metadata={"help": "Never delete versions divisible by this; 0: none."}
    )
    bucket_takeover: bool = field(
        default=False, metadata={"help": "Take over a run that is marked running."}
    )
    bucket_timeout_s: float = field(
        default=600.0, metadata={"help": "Longest time to publish one version, seconds."}
    )

    def callbacks(self) -> list[BucketSyncCallback]:
        """For ``callbacks=`` of a trainer.

        Raises:
            ConfigError: a value is wrong, or nothing would ever be published.
        """
        from trl_async_bucket.callback import BucketSyncCallback

        if self.bucket_url is None:
            if self.bucket_every_steps is not None or self.bucket_on_improvement:
                raise ConfigError("bucket_every_steps and bucket_on_improvement need bucket_url")
            return []
        return [
            BucketSyncCallback(
                self.bucket_url,
                self.bucket_run_id,
                every_steps=self.bucket_every_steps,
                on_improvement=self.bucket_on_improvement,
                server_url=self.bucket_server_url,
                dtype=self.bucket_dtype,
                base_model=self.bucket_base_model,
                window=self.bucket_window,
                keep_every=self.bucket_keep_every,
                takeover=self.bucket_takeover,
                timeout_s=self.bucket_timeout_s,
            )
        ]

"""The ``bucket_*`` fields about checkpoints and preemption. Imports no TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adapter_bucket.errors import ConfigError

DEFAULT_LIMIT = 2
"""The newest, and the one before should the newest turn out to be damaged."""


@dataclass
class BucketCheckpointFields:
    """Fields added to a TRL config. With ``weight_sync="trl"`` they change nothing."""

    bucket_checkpoints: bool = field(
        default=True,
        metadata={
            "help": "Upload every checkpoint that `save_strategy` writes to the bucket, in the "
            "background. `resume_from_checkpoint='bucket'` continues from the newest one on any "
            "machine."
        },
    )
    bucket_checkpoint_limit: int = field(
        default=-1,
        metadata={
            "help": "How many checkpoints stay in the bucket. -1: as many as `save_total_limit` "
            f"keeps locally, or {DEFAULT_LIMIT}."
        },
    )
    bucket_grace_s: float = field(
        default=25.0,
        metadata={
            "help": "Seconds from SIGTERM (a spot notice) to the end of the process. Within them "
            "training stops at a step boundary, publishes its last version, uploads a last "
            "checkpoint if there is time, and marks the run interrupted. Clouds give 30 to 120 s. "
            "0: SIGTERM is left alone."
        },
    )

    # Without an annotation: no field, and so no flag.
    bucket_run_id_given = False
    """Whether ``bucket_run_id`` was set: only a name that was chosen can be resumed."""

    def check_checkpoint_fields(self: Any) -> None:
        """Check the fields.

        Raises:
            ConfigError: names the field, its value and what to write instead.
        """
        if self.bucket_checkpoint_limit != -1 and self.bucket_checkpoint_limit < 1:
            raise ConfigError(
                f"bucket_checkpoint_limit={self.bucket_checkpoint_limit} must be at least 1, or -1 "
                "for as many as save_total_limit. Set bucket_checkpoints=False for none"
            )
        if self.bucket_grace_s < 0:
            raise ConfigError(
                f"bucket_grace_s={self.bucket_grace_s} must not be negative; 0 leaves SIGTERM alone"
            )
        if self.bucket_grace_s and getattr(self, "enable_jit_checkpoint", False):
            raise ConfigError(
                "enable_jit_checkpoint=True and bucket_grace_s both act on SIGTERM. Drop the "
                "first, or set bucket_grace_s=0 (then nothing is uploaded on SIGTERM)"
            )

    @property
    def checkpoint_limit(self: Any) -> int:
        """How many checkpoints stay, the default filled in."""
        if self.bucket_checkpoint_limit != -1:
            return int(self.bucket_checkpoint_limit)
        return int(getattr(self, "save_total_limit", None) or DEFAULT_LIMIT)

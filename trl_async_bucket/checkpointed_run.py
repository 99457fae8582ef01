"""What a training run does about checkpoints: they go to the bucket, and it resumes from there.

The part of ``TrainingRun`` that is about the trainer's state; the part about the adapter is there.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from adapter_bucket.checkpoint_upload import CheckpointWriter
from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import checkpoint_dir
from adapter_bucket.stores import open_store
from trl_async_bucket.checkpoints import CheckpointUploader, UploadRecord
from trl_async_bucket.compat.cpu_ranks import let_torch_load_to_numbered_cpus
from trl_async_bucket.fleet import base_model_ref
from trl_async_bucket.ranks import all_ranks, world_size
from trl_async_bucket.resume import (
    RESUME,
    ResumePoint,
    ResumeRequest,
    asked_for,
    check_still_newest,
    resume_point,
)
from trl_async_bucket.staging import discard_leftovers
from trl_async_bucket.sync import BucketSync
from trl_async_bucket.trainer_facts import check_storable, sharding_of, trainer_facts

if TYPE_CHECKING:
    # What the trainer behind the mixin provides; at run time it is found by the class order.
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)

STOP_S = 1.0
"""For an upload that is given up to come to the end of its file; what it leaves is garbage."""


class CheckpointedRun(_Base):  # type: ignore[misc]
    """Checkpoints in the bucket, and resuming from them.

    ``TrainingRun`` calls ``_run_begins``, ``_run_ends`` and ``_run_fails`` around the training
    loop, on all ranks.
    """

    _uses_bucket: bool
    _bucket: BucketSync | None
    _bucket_uploader: CheckpointUploader | None = None
    """On rank 0 only, while the run is claimed and checkpoints are wanted."""
    _bucket_resumed: ResumePoint | None = None
    _bucket_succeeds: bool = False
    """Whether this trainer asked to resume the run: then it is its next one, whoever has it."""
    _bucket_saved_step: int = 0
    """Step of the newest checkpoint on the local disk; where training began, before the first."""
    _bucket_save_s: float = 0.0
    """How long the last checkpoint took to write to the local disk."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's; ``resume_from_checkpoint`` may also be ``"bucket"`` or ``"bucket:required"``.

        Without weight sync through the bucket these are names of folders, as any other.
        """
        if not self._uses_bucket:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        asked = asked_for(resume_from_checkpoint, self.args.resume_from_checkpoint)
        self._bucket_resumed, self._bucket_succeeds = None, asked is not None
        if self.args.device.type == "cpu":
            let_torch_load_to_numbered_cpus()
        if asked is not None:
            self._bucket_resumed = self._find_resume_point(asked)
            point = self._bucket_resumed
            resume_from_checkpoint = None if point is None else str(point.path)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _find_resume_point(self, asked: str) -> ResumePoint | None:
        config = self.args
        if not config.bucket_run_id_given:
            raise ConfigError(
                f"resume_from_checkpoint={asked!r} needs bucket_run_id: by default every start "
                "makes a new one, and there would never be a checkpoint of it"
            )
        request = ResumeRequest(
            run_id=config.bucket_run_id,
            output_dir=Path(config.output_dir),
            required=asked != RESUME,
            sharding=sharding_of(self),
        )
        return resume_point(
            request,
            open_bucket=lambda: open_store(config.bucket_url),
            base_model=lambda: base_model_ref(
                self.accelerator.unwrap_model(self.model), config.bucket_base_model
            ),
        )

    def _run_begins(self) -> None:
        """Claim the run, and make ready for checkpoints. All ranks; all raise if rank 0 does."""
        point = self._bucket_resumed
        self._bucket_saved_step = 0 if point is None else point.entry.step
        if self._wants_checkpoints:
            check_storable(self)
        with all_ranks("claiming the run"):
            self._claim_run()
        if not any(isinstance(one, _RunCallback) for one in self.callback_handler.callbacks):
            self.add_callback(_RunCallback(self))  # behind TRL's, which sync at the end of a step

    def _claim_run(self) -> None:
        """Rank 0."""
        bucket = self._bucket
        if bucket is None:
            return
        if not bucket.running:
            bucket.start(takeover=self._bucket_succeeds)
        if self._bucket_resumed is not None:
            check_still_newest(bucket.writer.manifest, self._bucket_resumed)
        if self._wants_checkpoints:
            discard_leftovers(Path(self.args.output_dir))
            writer = CheckpointWriter(
                bucket.store, bucket.writer.ownership, limit=self.args.checkpoint_limit
            )
            self._bucket_uploader = CheckpointUploader(bucket.store, writer)

    @property
    def _wants_checkpoints(self) -> bool:
        return bool(self.args.bucket_checkpoints) and self.args.save_strategy != "no"

    def _run_ends(self) -> None:
        """Training came to its end, the last version is handed over. All ranks."""
        if self._bucket_uploader is not None:
            uploader, self._bucket_uploader = self._bucket_uploader, None
            if not uploader.drain(None):
                logger.error("the last checkpoint did not get into the bucket; it is only local")
            uploader.stop(STOP_S)
            uploader.check()

    def _run_fails(self) -> None:
        """Training ended by an exception. All ranks."""
        if self._bucket_uploader is not None:
            uploader, self._bucket_uploader = self._bucket_uploader, None
            uploader.stop(STOP_S)

    def _take_uploads(self) -> list[UploadRecord]:
        return self._bucket_uploader.take_records() if self._bucket_uploader else []

    def _step_ended(self) -> None:
        """All ranks, after every optimizer step."""
        # Several ranks learn of an error when the next checkpoint is saved: sharing it here would
        # cost a collective a step.
        if self._bucket_uploader is not None and world_size() == 1:
            self._bucket_uploader.check()

    def _checkpoint_saved(self) -> None:
        """All ranks, after the trainer wrote a checkpoint."""
        self.accelerator.wait_for_everyone()  # rank 0 may be done before the others' parts are
        step = self.state.global_step
        self._bucket_saved_step = step
        with all_ranks("handing over a checkpoint"):
            if self._bucket_uploader is not None:
                folder = Path(self.args.output_dir) / checkpoint_dir(step)
                self._bucket_uploader.submit(folder, step=step, trainer=trainer_facts(self))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, timed: at a preemption a last one is written only if there is time for it."""
        started = time.monotonic()
        output = super()._save_checkpoint(*args, **kwargs)
        self._bucket_save_s = time.monotonic() - started
        return output


class _RunCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the run what the trainer does. Added last, so that TRL's syncs come before it."""

    def __init__(self, run: CheckpointedRun) -> None:
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run._step_ended()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run._checkpoint_saved()

"""The background uploader: from a checkpoint that the trainer wrote to one in the bucket.

Owns one thread, and what happens when an upload fails. The optimizer never waits for an upload; a
failing one is loud, and ends the run once it stands to lose more than it knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.errors import (
    BucketError,
    ConfigError,
    FencedError,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.store import Store
from trl_async_bucket.staging import discard, stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED = 3
"""Checkpoints that may fail in a row before training stops: a run that believes itself safe must
not go on for hours with nothing to come back to. One failure can be an outage that passes."""

RETRY_PAUSES_S = (2.0, 10.0, 30.0)
"""Between the attempts of one checkpoint; each attempt has the store's own retries in it."""


@dataclass(frozen=True)
class UploadRecord:
    """What one checkpoint's upload cost, for the metrics."""

    step: int
    nbytes: int
    upload_s: float


@dataclass(frozen=True)
class _Staged:
    folder: Path
    step: int
    trainer: TrainerFacts


class CheckpointUploader:
    """Uploads checkpoints one at a time on a thread of its own. Lives on rank 0.

    The one being uploaded is brought to its end; of those that come meanwhile the newest is kept.

    Args:
        store: Where the run lives.
        writer: Commits the checkpoints; its run is ours.
    """

    def __init__(
        self,
        store: Store,
        writer: CheckpointWriter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._changed = threading.Condition()
        self._pending: _Staged | None = None
        self._busy = True
        """Also while leftovers are removed, before the first checkpoint."""
        self._stopping = False
        self._aborted = False
        self._failed = 0
        self._error: Exception | None = None
        self._committed_step = -1
        self._skipped = 0
        self._records: list[UploadRecord] = []
        self._thread = threading.Thread(target=self._run, name="bucket-checkpoints", daemon=True)
        self._thread.start()

    @property
    def committed_step(self) -> int:
        """Step of the newest checkpoint that this uploader committed; -1 before the first."""
        with self._changed:
            return self._committed_step

    @property
    def skipped(self) -> int:
        """Checkpoints replaced by a newer one before their upload began."""
        with self._changed:
            return self._skipped

    def take_records(self) -> list[UploadRecord]:
        """Records of the uploads finished since the last call."""
        with self._changed:
            records, self._records = self._records, []
            return records

    def submit(self, checkpoint: Path, *, step: int, trainer: TrainerFacts) -> None:
        """Hand over a complete checkpoint directory; it may be deleted afterwards.

        Blocks for the making of hard links only.

        Raises:
            BucketError: what stopped the uploader; see ``check``.
        """
        self.check()
        try:
            staged = _Staged(stage(checkpoint), step, trainer)
        except OSError as error:
            self._count_failure(step, error)
            return
        with self._changed:
            old, self._pending = self._pending, staged
            self._skipped += old is not None
            self._changed.notify_all()
        if old is not None:
            logger.warning(
                "checkpoint %d is not uploaded: checkpoint %d is newer, and the bucket is slower "
                "than save_steps",
                old.step,
                step,
            )
            discard(old.folder)

    def check(self) -> None:
        """Raise what must stop the training.

        Raises:
            FencedError: another trainer owns the run.
            StoreDenied: the store refuses to write checkpoints.
            ConfigError: this checkpoint can never be stored, nor one like it.
            StoreUnavailable: the last ``MAX_FAILED`` checkpoints all failed.
        """
        with self._changed:
            if self._error is not None:
                raise self._error

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until nothing is left to upload; false if that took too long, or failed."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._error is not None or (self._pending is None and not self._busy),
                timeout=timeout_s,
            )
            return ended and self._error is None and self._failed == 0

    def stop(self, timeout_s: float) -> None:
        """Give up what is not uploaded, and end the thread.

        An upload that is under way ends between two files. What it leaves is garbage that the next
        trainer removes.
        """
        with self._changed:
            self._stopping = self._aborted = True
            pending, self._pending = self._pending, None
            self._changed.notify_all()
        if pending is not None:
            discard(pending.folder)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._clean()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending is not None or self._stopping)
                if self._pending is None:
                    return
                active, self._pending = self._pending, None
                self._busy = True
            try:
                self._upload(active)
            except (FencedError, StoreDenied, ConfigError) as error:  # never mends itself
                logger.error("uploading checkpoint %d failed: %s", active.step, error)
                with self._changed:
                    self._error, self._busy = error, False
                    self._changed.notify_all()
                return
            except Exception as error:  # the thread's boundary: counted, raised in the trainer
                self._count_failure(active.step, error)
            finally:
                discard(active.folder)

    def _clean(self) -> None:
        try:
            if removed := self._writer.clean():
                logger.info("removed %d checkpoints that were never completed", removed)
        except BucketError as error:  # the next writer, or ``bucket-lora gc``, does it
            logger.warning("old checkpoints are not cleaned up: %s", error)

    def _upload(self, staged: _Staged) -> None:
        started = self._clock()
        self._retried(staged.step, self._writer.confirm)
        upload = CheckpointUpload(
            self._store,
            self._writer.run_id,
            staged.folder,
            step=staged.step,
            epoch=self._writer.epoch,
            trainer=staged.trainer,
            should_stop=lambda: self._aborted,
        )
        entry = self._retried(staged.step, upload.run)
        self._retried(staged.step, lambda: self._writer.commit(entry))
        upload_s = self._clock() - started
        logger.info(
            "checkpoint %d is in the bucket: %d bytes in %.1f s", entry.step, entry.size, upload_s
        )
        with self._changed:
            self._failed = 0
            self._committed_step = entry.step
            self._records.append(UploadRecord(entry.step, entry.size, upload_s))

    def _retried(self, step: int, call: Callable[[], T]) -> T:
        for pause_s in RETRY_PAUSES_S:
            try:
                return call()
            except StoreDenied:
                raise
            except StoreUnavailable as error:
                with self._changed:
                    if self._aborted:
                        raise
                    logger.warning(
                        "uploading checkpoint %d again in %.0f s: %s", step, pause_s, error
                    )
                    self._changed.wait_for(lambda: self._aborted, timeout=pause_s)
        return call()

    def _count_failure(self, step: int, error: Exception) -> None:
        with self._changed:
            if self._aborted:
                return
            self._failed += 1
            logger.error(
                "checkpoint %d did not get into the bucket (%d in a row, training stops at %d): %s",
                step,
                self._failed,
                MAX_FAILED,
                error,
            )
            if self._failed >= MAX_FAILED:
                self._error = StoreUnavailable(
                    f"the last {self._failed} checkpoints did not get into the bucket; the newest "
                    f"one there is of step {self._committed_step} of this trainer, if any. The "
                    f"last error: {error}. Mend the bucket and resume, or set "
                    "bucket_checkpoints=False"
                )
            self._changed.notify_all()

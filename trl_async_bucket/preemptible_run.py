"""What a training run does on SIGTERM: stop between two steps, and save what the time allows.

When the signal arrives, and that the process ends in time, is in ``preemption``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from trl_async_bucket.checkpointed_run import STOP_S, CheckpointedRun
from trl_async_bucket.preemption import Preempted, SigtermWatch
from trl_async_bucket.ranks import all_ranks, from_rank_0
from trl_async_bucket.sync import BucketSync

logger = logging.getLogger(__name__)

MANIFEST_S = 1.0
"""Kept of the time that is left for the manifest's last write."""


class PreemptibleRun(CheckpointedRun):
    """A clean stop on SIGTERM, besides checkpoints.

    ``TrainingRun`` calls ``_release_sigterm`` behind the training loop, and provides
    ``_snapshot_last``.
    """

    control: Any
    model_version: int
    _bucket_syncs: int
    _bucket_sigterm: SigtermWatch | None = None
    """Between begin and end of the training loop, where SIGTERM can be watched on some rank."""
    _bucket_stopped: bool = False

    def _run_begins(self) -> None:
        self._bucket_stopped = False
        super()._run_begins()
        # Rank 0's, and the same decision on all: a watched step ends with a collective, and a rank
        # that does not enter it leaves the others there.
        grace_s = from_rank_0(self.args.bucket_grace_s)
        if grace_s:
            watch = SigtermWatch(grace_s, on_last_call=self._last_call)
            installed = watch.install()
            self._bucket_sigterm = watch if self._any_rank(installed) else None
            if self._bucket_sigterm is not None and not installed:
                logger.info("this rank stops when another one gets SIGTERM")

    def _release_sigterm(self) -> bool:
        """The training loop is left, however; says whether a notice came. All ranks."""
        watch, self._bucket_sigterm = self._bucket_sigterm, None
        if watch is None:
            return False
        watch.settled()
        watch.uninstall()
        return watch.noticed

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. A notice ends the wait for rollouts."""
        return self._waiting(lambda: super(PreemptibleRun, self).get_batch_samples(*args, **kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. A notice ends an evaluation."""
        return self._waiting(lambda: super(PreemptibleRun, self).evaluate(*args, **kwargs))

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's: GRPO generates here. A notice ends the wait for completions."""
        return self._waiting(lambda: super(PreemptibleRun, self)._prepare_inputs(*args, **kwargs))

    def _waiting(self, call: Callable[[], Any]) -> Any:
        """Run what happens between two optimizer steps; a notice stops the run there.

        With several ranks it does not: the others wait in a collective, and only together can they
        come to a boundary. The deadline is kept all the same.
        """
        watch = self._bucket_sigterm
        if watch is None or self.args.world_size > 1:
            return call()
        try:
            with watch.interruptible():
                return call()
        except Preempted:
            self._stop_for_preemption()
            raise

    def _uncut(self) -> AbstractContextManager[None]:
        """A stretch inside a wait that must not be cut."""
        watch = self._bucket_sigterm
        return nullcontext() if watch is None else watch.interruptible(False)

    def _step_ended(self) -> None:
        super()._step_ended()
        watch = self._bucket_sigterm
        if watch is not None and self._any_rank(watch.noticed):
            watch.notice()
            self._stop_for_preemption()
            raise Preempted

    def _any_rank(self, value: bool) -> bool:
        if self.args.world_size == 1:
            return value
        flag = torch.tensor(int(value), device=self.args.device)
        return bool(self.accelerator.reduce(flag, reduction="sum").item())

    def _stop_for_preemption(self) -> None:
        """Publish, checkpoint, mark interrupted: as far as the time allows. Once. All ranks."""
        watch = self._bucket_sigterm
        if watch is None or self._bucket_stopped:
            return
        self._bucket_stopped = True
        if self._bucket_syncs:  # else the policy is as it was, in the bucket too
            for part in (self._snapshot_last, partial(self._save_last, watch)):
                try:
                    with all_ranks("saving on SIGTERM"):  # each part has collectives of its own
                        part()
                except Exception as error:  # the process ends in any case; what can be saved is
                    logger.error("SIGTERM: %s", error)
        # The others wait for rank 0: a launcher that sees one rank end signals the rest again.
        with all_ranks("stopping on SIGTERM"):
            if self._bucket is not None:
                self._close_interrupted(self._bucket, watch)
        watch.settled()

    def _snapshot_last(self) -> None:
        """Hand the policy of the last step over, if it is not yet."""
        raise NotImplementedError

    def _save_last(self, watch: SigtermWatch) -> None:
        """Write a last checkpoint, if there are new steps and, in rank 0's opinion, time."""
        wanted = self._wants_checkpoints and self._bucket_saved_step < self.state.global_step
        in_time = self._bucket_save_s < watch.left_s
        if self._any_rank(self.is_world_process_zero() and wanted and in_time):
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _close_interrupted(self, bucket: BucketSync, watch: SigtermWatch) -> None:
        uploader, self._bucket_uploader = self._bucket_uploader, None
        try:
            published = bucket.publish_pending(max(watch.left_s - MANIFEST_S, MANIFEST_S))
            whole = uploader is None or uploader.drain(max(watch.left_s - MANIFEST_S, 0.0))
            if uploader is not None:
                uploader.stop(STOP_S)
            bucket.interrupt()
        except Exception as error:  # the process ends in any case
            logger.error("the run could not be closed: %s", error)
            return
        checkpoints = "no checkpoint was wanted"
        if uploader is not None:
            newest = uploader.committed_step
            checkpoints = f"the newest checkpoint of this trainer in the bucket is {newest}"
            checkpoints += "" if whole else " (the last one did not get there in time)"
        logger.warning(
            "stopped after step %d on SIGTERM: version %d %s; %s; the run is marked interrupted",
            self.state.global_step,
            self.model_version,
            "is published" if published else "could not be published in time",
            checkpoints,
        )

    def _last_call(self, left_s: float) -> None:
        """On the deadline's thread: the trainer came to no boundary. Rank 0."""
        bucket = self._bucket
        if bucket is not None:
            bucket.publish_pending(max(left_s - MANIFEST_S, 0.0))
            bucket.interrupt()
            logger.warning("no step boundary came in time; the run is marked interrupted")

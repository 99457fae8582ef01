"""What every drop-in trainer does around a training run: claim, sync, finish or interrupt, log.

A mixin in front of a TRL trainer. Owns which rank does what and when; knows the bucket through
``BucketSync`` only, and of TRL only what all its trainers share.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from adapter_bucket.json_logs import set_up_logs
from adapter_bucket.probe import Probe
from trl_async_bucket.gather import AdapterGather, plan_gather
from trl_async_bucket.preemptible_run import PreemptibleRun
from trl_async_bucket.preemption import Preempted
from trl_async_bucket.probe_maker import ProbeMaker, Score, probe_tokens, score_plainly
from trl_async_bucket.ranks import all_ranks
from trl_async_bucket.sync import BucketSync

logger = logging.getLogger(__name__)


class TrainingRun(PreemptibleRun):
    """Publishes a trainer's adapter, if ``weight_sync="bucket"``; else adds nothing.

    The trainer behind it must have ``_metrics`` (``mode -> name -> values``) and call
    ``_sync_to_bucket`` on all ranks when a policy version is to be published.
    """

    model_version: int = 0
    """Version of the newest snapshot."""
    _uses_bucket: bool = False
    _bucket: BucketSync | None = None
    """On rank 0 only."""
    _bucket_adapter: str = "default"
    _bucket_gather: AdapterGather | None = None
    _bucket_probes: ProbeMaker | None = None
    _bucket_syncs: int = 0
    """Syncs since the run was started; the same on all ranks."""
    _bucket_synced_step: int = -1
    """Step of the policy that was published last in this run."""
    _bucket_best_step: int | None = None
    """Step of the best model, once that was loaded in place of the last step's."""

    def _sync_to_bucket(self) -> None:
        """Snapshot, hand over, and wait only if the replicas are too far behind. All ranks."""
        started = time.perf_counter()
        with all_ranks("publishing the policy"):
            with self._uncut():
                snapshot_s = self._snapshot(self._make_probe())
            if self._bucket is not None:
                self._wait_for_replicas(self._bucket, snapshot_s, started=started)

    def _snapshot(self, probe: Probe | None) -> float:
        """Hand the adapter as it is now to the publisher; seconds it took. All ranks."""
        tensors, snapshot_s = self._gather_adapter(), 0.0
        if self._bucket is not None:
            version = max(self.model_version + 1, self._bucket.next_version)
            step = self._policy_step
            snapshot_s = self._bucket.take(tensors, version=version, step=step, probe=probe)
            self.model_version = version
        self._bucket_syncs += 1
        self._bucket_synced_step = self._policy_step
        return snapshot_s

    @property
    def _policy_step(self) -> int:
        """Optimizer step of the weights that the model holds now. The same on all ranks."""
        best: int | None = self._bucket_best_step
        return int(self.state.global_step) if best is None else best

    def _load_best_model(self) -> None:
        """The trainer's, at the end of training with ``load_best_model_at_end``."""
        super()._load_best_model()
        self._bucket_best_step = self.state.best_global_step

    def _snapshot_last(self) -> None:
        if self._bucket_synced_step != self._policy_step:
            self._snapshot(None)

    def _gather_adapter(self) -> Any:
        """All ranks, by the same path: a sharded parameter is gathered by a collective.

        The parameters are looked up at the first sync of a run, not in the constructor: FSDP
        replaces them when the model is prepared.
        """
        if self._bucket_gather is None:
            model = self.accelerator.unwrap_model(self.model)
            dtype = self._bucket.dtype if self._bucket is not None else None
            self._bucket_gather = plan_gather(model, self._bucket_adapter, dtype)
        return self._bucket_gather.gather()

    def _make_probe(self) -> Probe | None:
        """For the first two syncs of a start and then every N-th. All ranks, by the same count."""
        every = self.args.bucket_probe_every
        due = every > 0 and (self._bucket_syncs < 2 or self._bucket_syncs % every == 0)
        if not due or (score := self._probe_score()) is None:
            return None
        model = self.accelerator.unwrap_model(self.model)
        if self._bucket_probes is None:
            tokens = probe_tokens(self.processing_class, model.config.get_text_config().vocab_size)
            dtype = self._bucket.dtype if self._bucket is not None else "float32"
            self._bucket_probes = ProbeMaker(tokens, dtype=dtype, score=score)
        return self._bucket_probes.make(model)

    def _probe_score(self) -> Score | None:
        """How the model scores a sequence; ``None``: not at all. A trainer that patches the model's
        forward overrides this."""
        return score_plainly

    def _wait_for_replicas(self, bucket: BucketSync, snapshot_s: float, *, started: float) -> None:
        # Nothing can be sampled before the first version is ready.
        max_lag = 0 if self._bucket_syncs == 1 else None
        waited_s = self._waiting(lambda: bucket.wait_lag(max_lag))
        self.model_version = bucket.taken_version
        metrics = self._metrics["train"]
        metrics["bucket/snapshot_s"].append(snapshot_s)
        # Assigned, not appended: the mean of two version numbers in a log window is neither.
        metrics["bucket/version"] = [float(self.model_version)]
        metrics["bucket/lag"] = [float(bucket.lag)]
        metrics["bucket/wait_s"].append(waited_s)
        metrics["perf/weight_sync_s"].append(time.perf_counter() - started)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with the metrics of the syncs that finished since the last call."""
        if self._bucket is not None:
            self._drain_records(self._bucket)
        super().log(logs, start_time)

    def _drain_records(self, bucket: BucketSync) -> None:
        metrics = self._metrics["train"]
        for record in bucket.take_records():
            metrics["bucket/publish_s"].append(record.publish_s)
            metrics["bucket/ready_s"].append(record.ready_s)
            metrics["bucket/bytes"].append(float(record.nbytes))
            metrics["bucket/ready_version"] = [float(record.version)]
        metrics["bucket/skipped"] = [float(bucket.skipped)]
        metrics["bucket/passed_over"] = [float(bucket.passed_over)]
        for upload in self._take_uploads():
            metrics["bucket/checkpoint_s"].append(upload.upload_s)
            metrics["bucket/checkpoint_bytes"].append(float(upload.nbytes))
            metrics["bucket/checkpoint_step"] = [float(upload.step)]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not self._uses_bucket:
            return super()._inner_training_loop(*args, **kwargs)
        set_up_logs("trainer", run=self.args.bucket_run_id)  # ranks without a BucketSync, too
        self._bucket_gather, self._bucket_syncs = None, 0
        self._bucket_synced_step, self._bucket_best_step = -1, None
        try:
            self._run_begins()
            output = super()._inner_training_loop(*args, **kwargs)
            if self._bucket_synced_step != self._policy_step:
                self._sync_last()
            with all_ranks("finishing the run"):
                self._run_ends()
                if self._bucket is not None:
                    self._bucket.finish()
            self.log({})  # on all ranks: the last version's record came after TRL's last log
        except BaseException:
            self._run_fails()
            self._mark_interrupted()
            raise
        finally:
            noticed = self._release_sigterm()
        if noticed:
            raise Preempted  # it came when nothing was left to be stopped
        return output

    def _sync_last(self) -> None:
        """Publish what the model ends with. All ranks."""
        self._sync_to_bucket()

    def _mark_interrupted(self) -> None:
        if self._bucket is None:
            return
        try:
            self._bucket.interrupt()
        except Exception as error:  # the training error that is being raised matters more
            logger.warning("the run could not be marked interrupted: %s", error)

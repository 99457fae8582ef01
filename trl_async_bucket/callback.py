"""``BucketSyncCallback``: any ``transformers.Trainer`` publishes its LoRA adapter while it trains.

For supervised trainers (SFT, DPO, Reward, plain ``Trainer``): a served model can be tried during
training. Nothing in training depends on the servers; the drop-in trainers are for that.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from adapter_bucket.errors import BucketError, ConfigError
from adapter_bucket.layout import check_run_id
from adapter_bucket.ready_policy import ReadyPolicy
from trl_async_bucket.callback_config import PREVIEW_WINDOW
from trl_async_bucket.config import new_run_id
from trl_async_bucket.gather import AdapterGather, plan_gather
from trl_async_bucket.ranks import all_ranks
from trl_async_bucket.settings import SyncSettings
from trl_async_bucket.sync import BucketSync

logger = logging.getLogger(__name__)


class BucketSyncCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the adapter every ``every_steps`` steps, or whenever an evaluation improves.

    The run is claimed at the start of training and marked finished at its end, after the last
    version is published. If training ends by an exception, the run is marked interrupted at the
    next ``train()``, or at the exit of the process.

    Args:
        bucket_url: ``s3://bucket/prefix`` or ``file:///dir``.
        run_id: Name of the run; by default made of the output directory's name.
        every_steps: Optimizer steps between two versions; the last step is published, too.
            ``None``: only improvements are.
        on_improvement: Publish when ``metric_for_best_model`` is better than ever before.
        server_url: A replica or the proxy, to check before the first step that it could serve the
            run. ``None``: nothing is checked.
        dtype: On the wire. ``auto``: what the server serves in, or else the model's own dtype.
        base_model: Name of the base model as the replicas serve it.
        window: Versions that replicas keep ready.
        keep_every: Never delete versions divisible by this; 0: none.
        takeover: Take over a run that is marked running.
        timeout_s: Longest time to publish one version.

    Raises:
        ConfigError: nothing would ever be published, or a value is wrong.
    """

    def __init__(
        self,
        bucket_url: str,
        run_id: str | None = None,
        *,
        every_steps: int | None = None,
        on_improvement: bool = False,
        server_url: str | None = None,
        dtype: str = "auto",
        base_model: str | None = None,
        window: int = PREVIEW_WINDOW,
        keep_every: int = 0,
        takeover: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        if every_steps is None and not on_improvement:
            raise ConfigError(
                "BucketSyncCallback publishes nothing: give every_steps=N or on_improvement=True"
            )
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"every_steps={every_steps} must be at least 1")
        if window < 1:
            raise ConfigError(f"window={window} must be at least 1")
        if run_id is not None:
            check_run_id(run_id)
        self._every_steps = every_steps
        self._on_improvement = on_improvement
        self._run_id = run_id
        self._make_settings: Callable[[str], SyncSettings] = lambda name: SyncSettings(
            bucket_url=bucket_url,
            run_id=name,
            ready=ReadyPolicy("none"),
            window=window,
            max_lag=1,
            timeout_s=timeout_s,
            server_url=server_url,
            takeover=takeover,
            dtype=dtype,
            keep_every=keep_every,
            base_model=base_model,
        )
        self._bucket: BucketSync | None = None
        self._gather: AdapterGather | None = None
        self._adapter = ""
        self._synced_step = -1
        self._version = 0
        self._best: float | None = None

    @property
    def run_id(self) -> str | None:
        """Name of the run; known at the start of training if it was not given."""
        return self._run_id

    @property
    def version(self) -> int:
        """Version of the newest snapshot; 0 before the first."""
        return self._version

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check, claim the run."""
        model = kwargs["model"]
        if not hasattr(model, "peft_config"):
            raise ConfigError(
                "BucketSyncCallback publishes LoRA adapters: train a PeftModel, or give the "
                "trainer peft_config=LoraConfig(…)"
            )
        self._adapter = model.active_adapters[0]
        # The best so far of a training that goes on from a checkpoint.
        self._gather, self._synced_step, self._best = None, -1, state.best_metric
        with all_ranks("claiming the run"):
            if state.is_world_process_zero:
                self._interrupt()  # an earlier train() that ended by an exception: it has the run
                self._run_id = self._run_id or new_run_id(args.output_dir)
                bucket = BucketSync(model, self._adapter, self._make_settings(self._run_id))
                bucket.start()
                self._bucket = bucket
                atexit.register(self._interrupt)
                self._version = bucket.next_version - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish every ``every_steps``."""
        if self._every_steps is not None and state.global_step % self._every_steps == 0:
            self._publish(state.global_step, kwargs["model"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish if the evaluation improved."""
        if self._on_improvement and self._improved(args, kwargs.get("metrics") or {}):
            self._publish(state.global_step, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish what the model ends with, wait for the uploads, mark the run finished."""
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if self._every_steps is not None or best:
            step = state.best_global_step if best else None
            self._publish(step or state.global_step, kwargs["model"])
        with all_ranks("finishing the run"):
            if self._bucket is not None:
                self._bucket.finish()
                atexit.unregister(self._interrupt)
                # The trainer logs no more; what has ended since its last log stands there.
                self._report(self._bucket, {}, state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics of the syncs that finished since the last log."""
        logs = kwargs.get("logs")
        if self._bucket is not None and logs is not None:
            self._report(self._bucket, logs, state)

    def _report(self, bucket: BucketSync, logs: dict[str, float], state: Any) -> None:
        for record in bucket.take_records():
            logs["bucket/publish_s"] = record.publish_s
            logs["bucket/bytes"] = float(record.nbytes)
            logs["bucket/version"] = float(record.version)
        logs["bucket/skipped"] = float(bucket.skipped)
        if state.log_history:  # the trainer copied the logs before it called us
            state.log_history[-1].update(logs)

    def _improved(self, args: Any, metrics: dict[str, float]) -> bool:
        name = args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"on_improvement=True looks for {name!r} (metric_for_best_model) in the "
                f"evaluation; it has {', '.join(sorted(metrics))}"
            )
        greater = args.greater_is_better
        if greater is None:
            greater = not name.endswith("loss")
        value = metrics[name]
        better = self._best is None or (value > self._best if greater else value < self._best)
        if better:
            self._best = value
        return better

    def _publish(self, step: int, model: Any) -> None:
        """Publish the policy of a step. All ranks: a sharded parameter is gathered collectively."""
        if self._synced_step == step:
            return
        if self._gather is None:
            dtype = self._bucket.dtype if self._bucket is not None else None
            self._gather = plan_gather(model, self._adapter, dtype)
        with all_ranks("publishing the policy"):
            tensors = self._gather.gather()
            if self._bucket is not None:
                version = max(self._version + 1, self._bucket.next_version)
                self._bucket.take(tensors, version=version, step=step)
                self._version = version
        self._synced_step = step

    def _interrupt(self) -> None:
        if self._bucket is None:
            return
        try:
            self._bucket.interrupt()
        except BucketError as error:  # at exit: nobody is left to catch it
            logger.warning("run %s could not be marked interrupted: %s", self._run_id, error)

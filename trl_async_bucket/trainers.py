"""Drop-in trainers: TRL's classes with ``weight_sync="bucket"``.

Owns the overrides of TRL methods and nothing else; which methods, and why those, is in ``compat``.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from adapter_bucket.errors import ConfigError
from trl_async_bucket.compat.async_grpo import check_seam, import_trl
from trl_async_bucket.config import AsyncGRPOConfig
from trl_async_bucket.snapshot import full_tensors, lora_parameters
from trl_async_bucket.sync import BucketSync, SyncSettings

logger = logging.getLogger(__name__)

TrlAsyncGRPOTrainer: Any = import_trl()[1]
check_seam(TrlAsyncGRPOTrainer)


class AsyncGRPOTrainer(TrlAsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's ``AsyncGRPOTrainer`` whose weight sync goes through a bucket.

    With ``weight_sync="bucket"`` in its config, a sync blocks the optimizer loop for a copy of the
    LoRA factors only. The server is never paused, no adapter is pushed to it, and it needs neither
    ``VLLM_SERVER_DEV_MODE`` nor ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. With any other value this
    class is TRL's.

    Two version numbers are kept apart. ``model_version`` is that of the newest snapshot, and
    staleness is counted from it, so a slow bucket shows as staleness. The rollout worker is told a
    version only when it is ready, and requests that one.

    Args:
        args: An ``AsyncGRPOConfig`` of this package; TRL's own class is refused.
        kwargs: TRL's arguments. ``weight_transfer`` cannot be combined with bucket sync.

    Raises:
        ConfigError: bucket, adapter and replicas cannot work together; before the first step.
    """

    model_version: int

    def __init__(
        self, model: Any, reward_funcs: Any = None, *, args: AsyncGRPOConfig, **kwargs: Any
    ) -> None:
        self._bucket: BucketSync | None = None
        self._bucket_synced_step = -1
        self._adapter_parameters: Any = None
        if not isinstance(args, AsyncGRPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}: pass trl_async_bucket.AsyncGRPOConfig, with "
                "weight_sync='trl' for TRL's own sync"
            )
        self._uses_bucket = args.weight_sync == "bucket"
        if self._uses_bucket and kwargs.get("weight_transfer") is not None:
            raise ConfigError("weight_sync='bucket' and weight_transfer=… exclude each other")
        super().__init__(model, reward_funcs, args=args, **kwargs)
        if self._uses_bucket and not self._lora_sync:
            raise ConfigError(
                "weight_sync='bucket' publishes LoRA adapters: pass peft_config=LoraConfig(…) or a "
                "PeftModel, or set weight_sync='trl'"
            )

    def _init_lora_sync(self, model: Any) -> bool:
        if not self._uses_bucket:
            return bool(super()._init_lora_sync(model))
        self.vllm_client.wait_for_server_ready()
        args = self.args
        # The rollout worker is built with this name next, and asks for "<name>-v<version>".
        self._lora_name = args.bucket_run_id
        self._bucket = BucketSync(
            model,
            self._adapter_name,
            SyncSettings(
                bucket_url=args.bucket_url,
                run_id=args.bucket_run_id,
                takeover=args.bucket_takeover,
                dtype=args.bucket_dtype,
                ready=args.bucket_ready,
                max_lag=args.bucket_max_lag,
                keep_every=args.bucket_keep_every,
                base_model=args.bucket_base_model,
                window=args.max_staleness + 2,
                server_url=args.vllm_server_base_url,
                timeout_s=float(args.weight_sync_timeout),
            ),
            on_ready=self._advance_rollouts,
        )
        return True

    def _advance_rollouts(self, version: int) -> None:
        if self.rollout_worker is not None:
            self.rollout_worker.update_model_version(version)

    def _sync_weight(self) -> None:
        if not self._uses_bucket:
            return super()._sync_weight()  # type: ignore[no-any-return]
        started = time.perf_counter()
        tensors = self._gather_adapter()
        if self._bucket is not None:
            self._publish(self._bucket, tensors, started=started)
        self._bucket_synced_step = self.state.global_step
        return None

    def _gather_adapter(self) -> Any:
        """All ranks, by the same path: a sharded parameter is gathered by a collective.

        The parameters are looked up at the first sync of a run, not in the constructor: FSDP
        replaces them when the model is prepared.
        """
        if self._adapter_parameters is None:
            model = self.accelerator.unwrap_model(self.model)
            self._adapter_parameters = lora_parameters(model, self._adapter_name)
        return full_tensors(self._adapter_parameters)

    def _publish(self, bucket: BucketSync, tensors: Any, *, started: float) -> None:
        """Rank 0: snapshot, hand over, and wait only if the replicas are too far behind."""
        first = bucket.taken_version == 0
        version: int = max(self.model_version + 1, bucket.next_version)
        snapshot_s = bucket.take(tensors, version=version, step=self.state.global_step)
        self.model_version = version
        # The rollout worker starts right after the first sync and asks for that version.
        waited_s = bucket.wait_lag(0 if first else None)
        metrics = self._metrics["train"]
        metrics["bucket/snapshot_s"].append(snapshot_s)
        # Assigned, not appended: the mean of two version numbers in a log window is neither.
        metrics["bucket/version"] = [float(version)]
        metrics["bucket/lag"] = [float(bucket.lag)]
        metrics["bucket/wait_s"].append(waited_s)
        metrics["perf/weight_sync_s"].append(time.perf_counter() - started)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
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

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not self._uses_bucket:
            return super()._inner_training_loop(*args, **kwargs)
        self._adapter_parameters = None
        if self._bucket is not None:
            self._bucket.start()
        try:
            output = super()._inner_training_loop(*args, **kwargs)
            if self._bucket_synced_step != self.state.global_step:
                self._sync_weight()  # the last steps since the last multiple of weight_sync_steps
            if self._bucket is not None:
                self._bucket.finish()
        except BaseException:
            self._mark_interrupted()
            raise
        return output

    def _mark_interrupted(self) -> None:
        if self._bucket is None:
            return
        try:
            self._bucket.interrupt()
        except Exception as error:  # the training error that is being raised matters more
            logger.warning("the run could not be marked interrupted: %s", error)

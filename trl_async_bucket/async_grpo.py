"""Drop-ins for TRL's asynchronous GRPO: ``AsyncGRPOConfig`` and ``AsyncGRPOTrainer``.

Owns the overrides of TRL methods and nothing else; which methods, and why those, is in
``compat.async_grpo``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.json_logs import hide_logins
from trl_async_bucket.compat.async_grpo import check_seam, import_trl, probe_score
from trl_async_bucket.config import NEEDS_ADAPTER, BucketSyncFields, uses_bucket
from trl_async_bucket.probe_maker import Score
from trl_async_bucket.server_access import ServerAccess, give_access
from trl_async_bucket.sync import BucketSync
from trl_async_bucket.training_run import TrainingRun
from trl_async_bucket.watchdog import StarvationWatchdog

TrlAsyncGRPOConfig: Any
TrlAsyncGRPOTrainer: Any
TrlAsyncGRPOConfig, TrlAsyncGRPOTrainer = import_trl()
check_seam(TrlAsyncGRPOTrainer)


@dataclass
class AsyncGRPOConfig(BucketSyncFields, TrlAsyncGRPOConfig):  # type: ignore[misc]
    """TRL's ``AsyncGRPOConfig`` with bucket weight sync.

    All of TRL's fields keep their meaning. ``weight_sync_timeout`` (seconds) also limits how long
    the trainer waits for a version to become ready, and for the bucket, before it raises.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_bucket_fields(output_dir=self.output_dir)
        if self.weight_sync == "bucket":
            self.lag_limit(self.max_staleness)


class AsyncGRPOTrainer(TrainingRun, TrlAsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's ``AsyncGRPOTrainer`` whose weight sync goes through a bucket.

    With ``weight_sync="bucket"`` in its config, a sync blocks the optimizer loop for a copy of the
    LoRA factors only. The server is never paused, no adapter is pushed to it, and it needs neither
    ``VLLM_SERVER_DEV_MODE`` nor ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. With any other value, or
    without ``args``, this class is TRL's.

    Two version numbers are kept apart. ``model_version`` is that of the newest snapshot, and
    staleness is counted from it, so a slow bucket shows as staleness. The rollout worker is told a
    version only when it is ready, and requests that one.

    Args:
        args: An ``AsyncGRPOConfig`` of this package; TRL's own class is refused.
        more, kwargs: TRL's arguments. ``weight_transfer`` cannot be combined with bucket sync.

    Raises:
        ConfigError: bucket, adapter and replicas cannot work together; before the first step.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        self._uses_bucket = uses_bucket(args, AsyncGRPOConfig)
        self._ran = False
        if self._uses_bucket and kwargs.get("weight_transfer") is not None:
            raise ConfigError("weight_sync='bucket' and weight_transfer=… exclude each other")
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        if self._uses_bucket and not self._lora_sync:
            raise ConfigError(NEEDS_ADAPTER)
        self._bucket_adapter = self._adapter_name
        self._let_rollouts_in()
        if self._bucket is not None and self.rollout_worker is not None:
            self._watch_rollouts(self._bucket)

    def _init_lora_sync(self, model: Any) -> bool:
        if not self._uses_bucket:
            return bool(super()._init_lora_sync(model))
        args = self.args
        give_access(self.vllm_client, ServerAccess.of(args.vllm_server_base_url))
        try:
            self.vllm_client.wait_for_server_ready()
        except TimeoutError as error:
            raise StoreUnavailable(hide_logins(str(error))) from None
        # The rollout worker is built with this name next, and asks for "<name>-v<version>".
        self._lora_name = args.bucket_run_id
        settings = args.sync_settings(
            window=args.max_staleness + 2,
            max_lag=args.lag_limit(args.max_staleness),
            server_url=args.vllm_server_base_url,
            timeout_s=float(args.weight_sync_timeout),
        )
        self._bucket = BucketSync(
            model, self._adapter_name, settings, on_ready=self._advance_rollouts
        )
        return True

    def _let_rollouts_in(self) -> None:
        """Give the rollout worker, which is not started yet, an address that carries the token."""
        settings = getattr(self.rollout_worker, "_loop_kwargs", None)
        if self._uses_bucket and settings is not None:
            access = ServerAccess.of(self.args.vllm_server_base_url)
            settings["vllm_server_url"] = access.login_url

    def _watch_rollouts(self, bucket: BucketSync) -> None:
        """Look at publisher and replicas too, whenever TRL finds its rollout queue empty."""
        watchdog = StarvationWatchdog(
            bucket.replicas_fault, limit_s=float(self.args.weight_sync_timeout)
        )
        look_at_worker = self.rollout_worker.check_health

        def check_health(stale_after_s: float) -> None:
            look_at_worker(stale_after_s)
            bucket.check()
            # TRL adds to it at every rollout that arrives, and clears it at every step.
            watchdog.waiting((self.state.global_step, self._rollout_dataset.wait_s))

        self.rollout_worker.check_health = check_health

    def _advance_rollouts(self, version: int) -> None:
        if self.rollout_worker is not None:
            self.rollout_worker.update_model_version(version)

    def _sync_weight(self) -> None:
        if self._uses_bucket:
            self._sync_to_bucket()
        else:
            super()._sync_weight()

    def _probe_score(self) -> Score | None:
        return probe_score(self.temperature)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._uses_bucket and self._ran:
            # TRL syncs and starts its rollout worker at the first train() only.
            raise ConfigError(
                "train() was called twice on one AsyncGRPOTrainer, and TRL would start no rollouts "
                "again: make a new trainer (the same bucket_run_id goes on counting)"
            )
        self._ran = True
        return super()._inner_training_loop(*args, **kwargs)

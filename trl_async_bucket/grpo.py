"""Drop-ins for TRL's GRPO: ``GRPOConfig`` and ``GRPOTrainer``.

Owns the overrides of TRL's trainer; which of its parts they rest on is in ``compat.grpo``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import adapter_name
from trl_async_bucket.compat.grpo import check_seam, generation_backend, import_trl
from trl_async_bucket.config import NEEDS_ADAPTER, BucketSyncFields, uses_bucket
from trl_async_bucket.generation import (
    BucketGeneration,
    TrlClient,
    TrlGeneration,
    VersionedClient,
)
from trl_async_bucket.ranks import all_ranks
from trl_async_bucket.sync import BucketSync
from trl_async_bucket.training_run import TrainingRun

TrlGRPOConfig: Any
TrlGRPOTrainer: Any
TrlGRPOConfig, TrlGRPOTrainer = import_trl()
check_seam(TrlGRPOTrainer, TrlGeneration, TrlClient)

ON_POLICY_WINDOW = 1
"""Versions replicas keep ready: generations of a step have ended before the next is published."""


@dataclass
class GRPOConfig(BucketSyncFields, TrlGRPOConfig):  # type: ignore[misc]
    """TRL's ``GRPOConfig`` with bucket weight sync.

    ``weight_sync="bucket"`` generates on vLLM servers: ``use_vllm=True, vllm_mode="server"`` are
    set by it. ``vllm_server_base_url`` (or host and port) is a replica or the proxy.
    """

    bucket_ready: str = field(
        default="all",
        metadata={
            "help": "On how many replicas a version must be ready before the step's generations "
            "start: 'all', 'any', or 'quorum:N'. 'any' starts sooner behind the proxy, on fewer "
            "replicas."
        },
    )
    weight_sync_timeout: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds for one version to become ready, and for one generation request that "
            "meets no ready replica, before training stops with an error."
        },
    )

    def __post_init__(self) -> None:
        if self.weight_sync == "bucket":
            self.use_vllm, self.vllm_mode = True, "server"
        super().__post_init__()
        self.check_bucket_fields(output_dir=self.output_dir)
        if self.weight_sync == "bucket" and self.bucket_ready == "none":
            raise ConfigError(
                "bucket_ready='none' is for asynchronous training: GRPOTrainer generates with the "
                "version it has just published. Use 'all', 'any' or 'quorum:N'"
            )

    @property
    def server_url(self) -> str:
        """The replica or proxy that generates."""
        url: str | None = self.vllm_server_base_url
        return url or f"http://{self.vllm_server_host}:{self.vllm_server_port}"


class GRPOTrainer(TrainingRun, TrlGRPOTrainer):  # type: ignore[misc]
    """TRL's ``GRPOTrainer`` whose vLLM servers get each policy through a bucket.

    With ``weight_sync="bucket"`` training is on-policy as before: the completions of a step come
    from the version published for that step, by name, and a sync waits until it is ready on
    ``bucket_ready`` replicas. No process group joins trainer and servers, so they may run where
    NCCL cannot, and the servers need no development mode. With any other value, or without
    ``args``, this class is TRL's.

    Args:
        args: A ``GRPOConfig`` of this package; TRL's own class is refused.
        more, kwargs: TRL's arguments.

    Raises:
        ConfigError: bucket, adapter and replicas cannot work together; before the first step.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        self._in_training = False
        if args is None or not uses_bucket(args, GRPOConfig):
            super().__init__(model, reward_funcs, args, *more, **kwargs)
            return
        self._uses_bucket = True
        make = partial(
            BucketGeneration,
            connect=partial(self._connect_on_all, args),
            sync=self._publish_and_wait,
        )
        with generation_backend(make):
            super().__init__(model, reward_funcs, args, *more, **kwargs)

    def _connect_on_all(self, args: GRPOConfig, model: Any) -> VersionedClient | None:
        with all_ranks("connecting to the bucket and the replicas"):
            return self._connect_bucket(args, model)

    def _connect_bucket(self, args: GRPOConfig, model: Any) -> VersionedClient | None:
        """On all ranks; on rank 0, check everything that can be checked before the first step."""
        if not hasattr(model, "peft_config"):
            raise ConfigError(NEEDS_ADAPTER)
        self._bucket_adapter = model.active_adapters[0]
        if not self.accelerator.is_main_process:
            return None
        client = VersionedClient(
            args.server_url,
            connect_s=float(args.vllm_server_timeout),
            retry_s=float(args.weight_sync_timeout),
        )
        settings = args.sync_settings(
            window=ON_POLICY_WINDOW,
            max_lag=0,
            server_url=args.server_url,
            timeout_s=float(args.weight_sync_timeout),
        )
        self._bucket = BucketSync(model, self._bucket_adapter, settings)
        client.logprobs_mode = self._bucket.logprobs_mode
        return client

    def _publish_and_wait(self) -> str | None:
        with all_ranks("claiming the run"):
            if self._bucket is not None and not self._bucket.running:
                self._bucket.start()  # an evaluation before or after training
        self._sync_to_bucket()
        return adapter_name(self.args.bucket_run_id, self.model_version) if self._bucket else None

    def _sync_last(self) -> None:
        self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step  # TRL's: nothing is left to be synced

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's. Outside of training, a run claimed for it is marked interrupted afterwards."""
        with self._claimed_for_it():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; as ``evaluate``."""
        with self._claimed_for_it():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _claimed_for_it(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._uses_bucket and not self._in_training:
                self._mark_interrupted()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._in_training = True
        if self._uses_bucket:
            # TRL's: it syncs only where the step differs from that of its last sync. Another
            # training may begin at the same step with other weights, from a checkpoint.
            self._last_loaded_step = -1
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._in_training = False

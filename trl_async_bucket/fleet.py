"""The replicas as a trainer sees them: what they must be, what they serve, and how to ask them.

Owns the comparison before the first step and the choice of the way to learn what is ready. The
single refusals are in ``checks``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapter_bucket.base_model import BaseModelRef, architecture_fingerprint
from adapter_bucket.errors import BucketError
from adapter_bucket.status import ReplicaStatus
from adapter_bucket.store import Store
from trl_async_bucket.checks import (
    check_quantization,
    check_replicas,
    rounding_notes,
    serving_dtype,
)
from trl_async_bucket.heartbeat_readiness import HeartbeatReadiness
from trl_async_bucket.readiness import Readiness, ReplicaClient
from trl_async_bucket.settings import SyncSettings

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrainedModel:
    """What replicas are held against."""

    base_model: BaseModelRef
    rank: int
    """Largest rank of any module."""
    dtype: str
    """dtype of the base model in training, without ``torch.``."""
    quantization: str | None
    """``bitsandbytes``, ``gptq`` …; ``None``: the base model is whole."""

    @classmethod
    def of(cls, model: Any, base_model: BaseModelRef, rank: int) -> TrainedModel:
        """Read a ``peft.PeftModel``."""
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(base_model, rank, dtype, quantization_method(model))


@dataclass(frozen=True)
class Fleet:
    """What was learned of the replicas."""

    readiness: Readiness | None
    """``None``: nothing is asked."""
    dtype: str
    """dtype of the published adapters, without ``torch.``."""
    logprobs_mode: str = UNKNOWN
    """``--logprobs-mode`` of the replicas; all of them, where they differ."""

    def fault(self) -> str | None:
        """Why no replica can be asked; ``None`` if one answers, or none is ever asked."""
        try:
            if isinstance(self.readiness, ReplicaClient):
                self.readiness.replicas()
        except BucketError as error:
            return str(error)
        return None


def connect(settings: SyncSettings, store: Store, trained: TrainedModel) -> Fleet:
    """Check the replicas, as far as they can be asked now, and say how to ask them later.

    Raises:
        ConfigError: a replica could never serve the run; says what to change.
        StoreUnavailable: no replica answers.
    """
    dtype = settings.dtype if settings.dtype != "auto" else trained.dtype
    if settings.server_url is None:
        return Fleet(None, dtype)

    def check(replicas: Mapping[str, ReplicaStatus]) -> None:
        check_replicas(
            replicas, base_model=trained.base_model, rank=trained.rank, window=settings.window
        )
        check_quantization(replicas, trained.quantization)

    if settings.ready_via == "heartbeats":
        return Fleet(HeartbeatReadiness(store, settings.run_id, check=check), dtype)
    client = ReplicaClient(settings.server_url)
    replicas = client.replicas()
    check(replicas)
    if settings.dtype == "auto":
        dtype = serving_dtype(replicas)
    for note in rounding_notes(replicas, trained=trained.dtype, published=dtype):
        logger.warning(note)
    modes = {replica.logprobs_mode or UNKNOWN for replica in replicas.values()}
    return Fleet(client, dtype, ", ".join(sorted(modes)))


def base_model_ref(model: Any, override: str | None) -> BaseModelRef:
    """Reference of the base model under a ``peft.PeftModel``."""
    config = model.config
    return BaseModelRef(
        id=override or config._name_or_path or UNKNOWN,
        revision=getattr(config, "_commit_hash", None),
        architecture=architecture_fingerprint(config.to_dict()),
    )


def quantization_method(model: Any) -> str | None:
    """How the base model is quantised: ``bitsandbytes``, ``gptq`` …, or ``None``."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method) or UNKNOWN)

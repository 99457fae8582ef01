"""TRL trainers that publish their LoRA adapter to a bucket.

The names below are imported on first use, so that ``import trl_async_bucket`` loads neither torch
nor TRL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_async_bucket.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl_async_bucket.callback import BucketSyncCallback
    from trl_async_bucket.callback_config import BucketSyncArguments
    from trl_async_bucket.grpo import GRPOConfig, GRPOTrainer

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "BucketSyncArguments",
    "BucketSyncCallback",
    "GRPOConfig",
    "GRPOTrainer",
]

_HOMES = {
    "AsyncGRPOConfig": "trl_async_bucket.async_grpo",
    "AsyncGRPOTrainer": "trl_async_bucket.async_grpo",
    "BucketSyncArguments": "trl_async_bucket.callback_config",
    "BucketSyncCallback": "trl_async_bucket.callback",
    "GRPOConfig": "trl_async_bucket.grpo",
    "GRPOTrainer": "trl_async_bucket.grpo",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trl-async-bucket")
    if name not in _HOMES:
        raise AttributeError(f"module 'trl_async_bucket' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""TRL trainers that publish their LoRA adapter to a bucket.

The names below are imported on first use, so that ``import trl_async_bucket`` loads neither torch
nor TRL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_async_bucket.config import AsyncGRPOConfig
    from trl_async_bucket.trainers import AsyncGRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]

_HOMES = {
    "AsyncGRPOConfig": "trl_async_bucket.config",
    "AsyncGRPOTrainer": "trl_async_bucket.trainers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trl_async_bucket' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

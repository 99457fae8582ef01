"""The seam in TRL's ``AsyncGRPOTrainer``.

Owns the list of TRL internals that ``async_grpo`` overrides or reads. TRL gives no public way to
choose another weight sync that survives 1.18 (which drops the ``weight_transfer`` and
``rollout_worker`` arguments), so the drop-in overrides two private methods instead:

* ``_init_lora_sync(model)`` runs on rank 0 inside the constructor, before the rollout worker is
  made with ``self._lora_name``; its errors reach all ranks from TRL 1.15 on.
* ``_sync_weight()`` runs on all ranks, once at train begin and then every ``weight_sync_steps``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trl_async_bucket.compat.seam import check_methods, check_source, unsupported

if TYPE_CHECKING:
    import torch

_METHODS = {
    "_init_lora_sync": ["self", "model"],
    "_sync_weight": ["self"],
    "_inner_training_loop": ["self", "args", "kwargs"],
    "log": ["self", "logs", "start_time"],
}

_CONSTRUCTOR = (
    "self._lora_name if self._lora_sync",  # the worker takes the run id we set
    "self._init_lora_sync(model)",
    "StepIntervalCallback(self._sync_weight",
)


def import_trl() -> tuple[type, type]:
    """TRL's asynchronous GRPO config and trainer.

    Raises:
        UnsupportedUpstream: they are not where the tested versions have them.
    """
    try:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    except ImportError as error:
        raise unsupported(f"trl.experimental.async_grpo cannot be imported ({error})") from error
    return AsyncGRPOConfig, AsyncGRPOTrainer


def one_sequence(length: int, device: torch.device) -> dict[str, Any]:
    """Further arguments of the trained model's forward for one unpacked sequence.

    From TRL 1.16 on, its attention takes the layout of a packed row as arguments; one sequence is
    a row with a single segment.
    """
    import torch

    positions = torch.arange(length, device=device)
    arguments: dict[str, Any] = {"position_ids": positions[None]}
    if find_spec("trl.experimental.async_grpo.packing") is not None:
        bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
        arguments |= {
            "tree_kv_index": positions,
            "tree_cu_seqlens_q": bounds,
            "tree_cu_seqlens_k": bounds,
            "tree_max_seqlen_q": length,
            "tree_max_seqlen_k": length,
        }
    return arguments


def check_seam(trainer: Any) -> None:
    """Check that a TRL ``AsyncGRPOTrainer`` class has the seam this package overrides.

    Raises:
        UnsupportedUpstream: it does not; the message lists the tested versions.
    """
    check_methods(trainer, _METHODS)
    check_source(trainer.__init__, _CONSTRUCTOR)

"""The seam in TRL's ``AsyncGRPOTrainer``.

Owns the list of TRL internals that ``async_grpo`` overrides or reads. TRL gives no public way to
choose another weight sync that survives 1.18 (which drops the ``weight_transfer`` and
``rollout_worker`` arguments), so the drop-in overrides two private methods instead:

* ``_init_lora_sync(model)`` runs on rank 0 inside the constructor, before the rollout worker is
  made with ``self._lora_name``; its errors reach all ranks from TRL 1.15 on.
* ``_sync_weight()`` runs on all ranks, once at train begin and then every ``weight_sync_steps``.

``rollout_worker.check_health`` is called whenever the rollout queue stays empty for some seconds;
the drop-in looks at publisher and replicas there too.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trl_async_bucket.compat.seam import (
    check_methods,
    check_source,
    installed_trl,
    unsupported,
)
from trl_async_bucket.probe_maker import Score, score_plainly

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

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
    "vllm_server_url=self.args.vllm_server_base_url",  # to which we add the token
)

_DATALOADER = ("check_health_fn=self.rollout_worker.check_health", "self._rollout_dataset = ")


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


def probe_score(temperature: float) -> Score | None:
    """How the trained model, whose forward TRL has patched, scores one sequence.

    From TRL 1.16 on, its attention takes the layout of a packed row; one sequence is a row with a
    single segment. Before 1.15, the forward gives log-probabilities only, at the sampling
    temperature.

    Returns:
        ``None`` if log-probabilities at temperature 1 cannot be had.
    """
    if find_spec("trl.experimental.async_grpo.packing") is not None:
        return _score_as_row
    from trl.trainer import utils

    if hasattr(utils, "add_fused_lm_head"):
        return _score_with_positions
    if temperature == 1.0:
        return _score_by_labels
    logger.warning(
        "trl %s scores at the sampling temperature %g only: versions are published without probes",
        installed_trl(), temperature,
    )  # fmt: skip
    return None


def _score_as_row(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    import torch

    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=tokens.device)
    return score_plainly(
        model, tokens, position_ids=positions[None], tree_kv_index=positions,
        tree_cu_seqlens_q=bounds, tree_cu_seqlens_k=bounds,
        tree_max_seqlen_q=length, tree_max_seqlen_k=length,
    )  # fmt: skip


def _score_with_positions(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return score_plainly(model, tokens, position_ids=_positions(tokens))


def _score_by_labels(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=tokens, labels=tokens, position_ids=_positions(tokens))["log_probs"]
    flat: torch.Tensor = scores.float().flatten()
    return flat


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def check_seam(trainer: Any) -> None:
    """Check that a TRL ``AsyncGRPOTrainer`` class has the seam this package overrides.

    Raises:
        UnsupportedUpstream: it does not; the message lists the tested versions.
    """
    check_methods(trainer, _METHODS)
    check_source(trainer.__init__, _CONSTRUCTOR)
    check_source(trainer.get_train_dataloader, _DATALOADER)

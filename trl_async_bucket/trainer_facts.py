"""What of a trainer decides whether its checkpoints can be stored, and by whom they can be read."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.errors import ConfigError

logger = logging.getLogger(__name__)

_SOFTWARE = ("torch", "transformers", "trl", "peft", "accelerate")


def sharding_of(trainer: Any) -> str:
    """``none``, ``fsdp`` or ``deepspeed``: whether ranks write parts of a checkpoint."""
    if trainer.is_deepspeed_enabled:
        return "deepspeed"
    return "fsdp" if trainer.is_fsdp_enabled else "none"


def trainer_facts(trainer: Any) -> TrainerFacts:
    """What goes into a checkpoint's index."""
    return TrainerFacts(
        world_size=trainer.args.world_size, sharding=sharding_of(trainer), software=_software()
    )


def check_storable(trainer: Any) -> None:
    """Refuse checkpoints of which rank 0 would see a part only.

    Raises:
        ConfigError: they are sharded over several hosts.
    """
    ranks = trainer.args.world_size
    hosts = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if hosts > 1 and sharding_of(trainer) != "none":
        raise ConfigError(
            f"bucket_checkpoints=True with sharded checkpoints of {hosts} hosts: rank 0 sees the "
            "parts of its own host only. Train on one host, or set bucket_checkpoints=False and "
            "keep checkpoints on a disk that all hosts share"
        )
    if hosts > 1:
        logger.warning(
            "checkpoints in the bucket hold the random state of the first host's ranks only; the "
            "ranks of the other %d hosts draw new numbers after a resume",
            hosts - 1,
        )
    if trainer.args.save_only_model:
        logger.warning(
            "save_only_model=True: checkpoints in the bucket have no optimizer state, so a resumed "
            "run is not the one that never stopped"
        )


def _software() -> dict[str, str]:
    found = {}
    for name in _SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

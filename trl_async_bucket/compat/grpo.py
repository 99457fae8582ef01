"""The seam in TRL's ``GRPOTrainer``.

Owns the list of TRL internals that ``grpo`` and ``generation`` override or read. The trainer makes
one ``VLLMGeneration`` in its constructor and from then on calls only its ``sync_weights()``, when
the optimizer step has changed, and its ``generate(...)``. TRL has no argument to choose another
class, so ``generation_backend`` puts one in its place while the constructor runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_async_bucket.compat.seam import check_methods, check_source, unsupported

_TRAINER = ("_inner_training_loop", "log")
_GENERATION = {"_init_vllm": ["self"], "sync_weights": ["self"]}
_CLIENT = ("self.session.", "self.base_url", "self.model", "self._post(")
_CONSTRUCTOR = (
    "self.vllm_generation = VLLMGeneration(",
    "model=self.model,",
    "mode=args.vllm_mode",
    "self._last_loaded_step = -1",
)
_GENERATE = ("self.vllm_client.generate(", "self.vllm_client.image_features(")


def import_trl() -> tuple[type, type]:
    """TRL's GRPO config and trainer.

    Raises:
        UnsupportedUpstream: they are not where the tested versions have them.
    """
    try:
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise unsupported(f"trl.GRPOTrainer cannot be imported ({error})") from error
    return GRPOConfig, GRPOTrainer


def import_generation() -> tuple[type, type]:
    """TRL's generation backend and its HTTP client.

    Raises:
        UnsupportedUpstream: they are not where the tested versions have them.
    """
    try:
        from trl.generation.vllm_client import VLLMClient
        from trl.generation.vllm_generation import VLLMGeneration
    except ImportError as error:
        raise unsupported(f"trl.generation cannot be imported ({error})") from error
    return VLLMGeneration, VLLMClient


def check_seam(trainer: Any, generation: Any, client: Any) -> None:
    """Check that TRL's classes have the seam this package overrides.

    Raises:
        UnsupportedUpstream: they do not; the message lists the tested versions.
    """
    check_methods(generation, _GENERATION)
    check_source(trainer.__init__, _CONSTRUCTOR)
    check_source(generation.generate, _GENERATE)
    check_source(client, _CLIENT)
    for name in _TRAINER:
        if not hasattr(trainer, name):
            raise unsupported(f"{trainer.__name__} has no {name}")


@contextmanager
def generation_backend(make: Callable[..., Any]) -> Iterator[None]:
    """Let a ``GRPOTrainer`` constructor that runs inside make its backend with ``make``.

    A patch of one name in one TRL module, taken back at the end; not thread-safe. Can go once TRL
    takes the backend as an argument (``docs/upstream.md``).
    """
    from trl.trainer import grpo_trainer

    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = make
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original

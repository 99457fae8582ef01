"""The seam in TRL's ``AsyncGRPOTrainer``.

Owns the list of TRL internals that ``trainers`` overrides or reads. TRL gives no public way to
choose another weight sync that survives 1.18 (which drops the ``weight_transfer`` and
``rollout_worker`` arguments), so the drop-in overrides two private methods instead:

* ``_init_lora_sync(model)`` runs on rank 0 inside the constructor, before the rollout worker is
  made with ``self._lora_name``; its errors reach all ranks.
* ``_sync_weight()`` runs on all ranks, once at train begin and then every ``weight_sync_steps``.

The probe refuses a TRL that lacks any of these, instead of training with a sync that never runs.
"""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version

from adapter_bucket.errors import UnsupportedUpstream

TESTED_TRL = ("1.16.0",)
"""TRL releases on which the integration tests pass."""

_METHODS = {
    "_init_lora_sync": ["self", "model"],
    "_sync_weight": ["self"],
    "_inner_training_loop": ["self", "args", "kwargs"],
    "log": ["self", "logs", "start_time"],
}

_SOURCE_MARKS = (
    "self._lora_name if self._lora_sync",  # the worker takes the run id we set
    "self._init_lora_sync(model)",
    "StepIntervalCallback(self._sync_weight",
)


def installed_trl() -> str:
    """Version of the installed TRL.

    Raises:
        UnsupportedUpstream: TRL is not installed.
    """
    try:
        return version("trl")
    except PackageNotFoundError:
        raise UnsupportedUpstream(
            f"trl is not installed; install trl-async-bucket[trl] (tested: {_tested()})"
        ) from None


def import_trl() -> tuple[type, type]:
    """TRL's asynchronous GRPO config and trainer.

    Raises:
        UnsupportedUpstream: they are not where the tested versions have them.
    """
    try:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    except ImportError as error:
        raise _unsupported(f"trl.experimental.async_grpo cannot be imported ({error})") from error
    return AsyncGRPOConfig, AsyncGRPOTrainer


def check_seam(trainer: type) -> None:
    """Check that a TRL ``AsyncGRPOTrainer`` class has the seam this package overrides.

    Raises:
        UnsupportedUpstream: a method is missing or takes other arguments, or the constructor does
            not use it as expected. The message lists the tested versions.
    """
    for name, expected in _METHODS.items():
        method = getattr(trainer, name, None)
        actual = list(inspect.signature(method).parameters) if method else None
        if actual != expected:
            found = "it is missing" if actual is None else f"it takes {', '.join(actual)}"
            raise _unsupported(f"{trainer.__name__}.{name} should take {expected}: {found}")
    try:
        source = inspect.getsource(vars(trainer)["__init__"])
    except (KeyError, OSError):
        raise _unsupported(f"{trainer.__name__} has no constructor that can be read") from None
    for mark in _SOURCE_MARKS:
        if mark not in source:
            raise _unsupported(f"{trainer.__name__} is not built around {mark!r}")


def _unsupported(what: str) -> UnsupportedUpstream:
    return UnsupportedUpstream(
        f"trl {installed_trl()} is not supported for weight_sync='bucket': {what}. Install a "
        f"tested version: {_tested()}"
    )


def _tested() -> str:
    return ", ".join(f"trl=={release}" for release in TESTED_TRL)

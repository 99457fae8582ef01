"""Let an unchanged TRL script take ``weight_sync="bucket"``.

    import trl_async_bucket.auto          # before the names below are imported
    from trl import GRPOConfig, GRPOTrainer

puts the drop-ins in the places from which scripts import TRL's classes, asynchronous GRPO included.
A script that does not say ``weight_sync="bucket"`` trains as before: that is the one default which
differs from the classes of ``trl_async_bucket`` itself. ``python -m trl_async_bucket run`` does the
same without a line in the script.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from adapter_bucket.errors import ConfigError, UnsupportedUpstream
from trl_async_bucket.config import BucketSyncFields

logger = logging.getLogger(__name__)

_PLACES = {
    "grpo": ("trl", "trl.trainer", "trl.trainer.grpo_config", "trl.trainer.grpo_trainer"),
    "async_grpo": (
        "trl.experimental.async_grpo",
        "trl.experimental.async_grpo.async_grpo_config",
        "trl.experimental.async_grpo.async_grpo_trainer",
    ),
}
"""By module of ours: the modules of TRL whose names are replaced by its drop-ins."""

_NAMES = {
    "grpo": ("GRPOConfig", "GRPOTrainer"),
    "async_grpo": ("AsyncGRPOConfig", "AsyncGRPOTrainer"),
}


def install(defaults: Mapping[str, Any] = {}) -> None:
    """Put the drop-ins in TRL's places. Idempotent; the last call's defaults count.

    A TRL without the experimental trainer, or in which it cannot be imported, keeps its own for
    that one, with a warning.

    Args:
        defaults: Defaults of ``bucket_*`` fields for a config that does not set them.

    Raises:
        ConfigError: an unknown field, or ``__main__`` has imported TRL's classes already.
        UnsupportedUpstream: the installed TRL has not the seam in ``GRPOTrainer``.
    """
    fields = {"weight_sync": "trl", **defaults}
    for name in fields:
        if name not in BucketSyncFields.__dataclass_fields__:
            raise ConfigError(f"{name!r} is not a field of bucket weight sync")
    for module in _PLACES:
        try:
            _install_one(module, fields)
        except UnsupportedUpstream as error:
            if module == "grpo":
                raise
            logger.warning("TRL's own AsyncGRPOTrainer is left in place: %s", error)


def _install_one(module: str, fields: Mapping[str, Any]) -> None:
    ours = import_module(f"trl_async_bucket.{module}")
    config_name, trainer_name = _NAMES[module]
    _refuse_early_imports(getattr(ours, f"Trl{config_name}"), getattr(ours, f"Trl{trainer_name}"))
    config = _with_defaults(getattr(ours, config_name), fields)
    # Where pickle finds the class again: TRL saves its config in every checkpoint.
    globals()[config_name] = config
    for place in _PLACES[module]:
        target = import_module(place)
        setattr(target, config_name, config)
        setattr(target, trainer_name, getattr(ours, trainer_name))


def _refuse_early_imports(*classes: type) -> None:
    for name, value in vars(sys.modules["__main__"]).items():
        if value in classes:
            raise ConfigError(
                f"{name} was imported from TRL before trl_async_bucket.auto, so the script would "
                "go on with TRL's own: move `import trl_async_bucket.auto` above that line"
            )


def _with_defaults(config: type, fields: Mapping[str, Any]) -> type:
    """The config class with other defaults; its flags and help texts stay."""
    changed = []
    for field in dataclasses.fields(config):
        if field.name in fields:
            new = dataclasses.field(default=fields[field.name], metadata=field.metadata)
            changed.append((field.name, field.type, new))
    made = dataclasses.make_dataclass(config.__name__, changed, bases=(config,))
    made.__module__, made.__doc__ = __name__, config.__doc__
    return made


install()

"""From a live PEFT config to the ``adapter_config.json`` that travels with every version."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def portable_config(
    peft_config: Any, *, module_names: Iterable[str], base_model: str
) -> dict[str, Any]:
    """The adapter config as plain JSON values.

    A regex in ``target_modules`` is replaced by the paths of the modules that really carry the
    adapter: readers must not depend on matching the same names again.

    Args:
        peft_config: A ``peft.LoraConfig``.
        module_names: Parameter keys as ``snapshot.lora_parameters`` names them.
        base_model: Written as ``base_model_name_or_path``.

    Returns:
        A dict for ``adapter_bucket.publish.RunWriter.publish``.
    """
    config: dict[str, Any] = _plain(peft_config.to_dict())
    config["base_model_name_or_path"] = base_model
    config["inference_mode"] = True
    if isinstance(config.get("target_modules"), str):
        config["target_modules"] = sorted({_module_path(name) for name in module_names})
    return config


def largest_rank(shapes: Mapping[str, Sequence[int]]) -> int:
    """Largest rank of any module, read from the ``lora_A`` tensors (``[rank, in_features]``)."""
    return max(shape[0] for name, shape in shapes.items() if ".lora_A." in name)


def _module_path(key: str) -> str:
    return key.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)

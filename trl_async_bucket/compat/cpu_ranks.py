"""Several ranks on CPUs: a device name that ``torch.load`` does not know.

accelerate 1.15 numbers CPUs as it numbers GPUs, transformers 5.17 loads the optimizer's state to
that device (``cpu:0``), and torch 2.13 has a way to load to ``cpu`` only: "don't know how to
restore data location". So no checkpoint could be resumed by several ranks without GPUs. Can go when
``test_cpu_ranks`` says so.
"""

from __future__ import annotations

from typing import Any

import torch

_PRIORITY = 11
"""Behind torch's own for ``cpu``, which is 10."""


def let_torch_load_to_numbered_cpus() -> None:
    """Let ``torch.load(…, map_location="cpu:0")`` mean ``"cpu"``, in this process. Idempotent."""
    global _installed
    if not _installed:
        torch.serialization.register_package(_PRIORITY, _no_tag, _stay_on_cpu)
        _installed = True


_installed = False


def _no_tag(_storage: Any) -> None:
    """Saved storages keep torch's own tag."""


def _stay_on_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None

"""vLLM's worker side: refuse an adapter whose module names the served model does not have.

vLLM compares only the last part of a module's name with what the model knows. An adapter with a
wrong prefix loads without an error, changes nothing, and the server answers as the base model.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from vllm_bucket_lora.config import SESSION_ENV


def install_module_check() -> None:
    """Wrap ``WorkerLoRAManager._load_adapter`` for adapters of this server's bucket. Idempotent.

    To be removed once vLLM itself refuses an adapter of which it applies only a part.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    original = WorkerLoRAManager._load_adapter
    if getattr(original, "_bucket_lora", False):
        return

    @functools.wraps(original)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        lora = original(self, lora_request)
        if lora_request.lora_path.startswith(os.environ[SESSION_ENV]):
            check_modules(lora.loras, self._adapter_manager)
        return lora

    _load_adapter._bucket_lora = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter


def check_modules(adapter_modules: Any, manager: Any) -> None:
    """Compare an adapter's modules with those that the model has.

    Names inside fused experts are left to vLLM, which renames them while loading.

    Raises:
        ValueError: some have no counterpart; the message names the first ones.
    """
    from vllm.distributed import get_pp_group

    if get_pp_group().world_size > 1:
        return  # this worker has some of the layers only
    known = set(manager.modules)
    for parts in manager.packed_modules.values():  # qkv_proj: q_proj, k_proj, v_proj
        known.update(parts)
    unknown = sorted(name for name in set(adapter_modules) - known if ".experts" not in name)
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if unknown[3:] else "")
        raise ValueError(
            f"the served model has no module {shown}; publish the adapter with the module names of "
            "the base model as transformers loads it"
        )

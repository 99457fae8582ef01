"""A vLLM plugin that times what loading an adapter costs the engine loop.

Loaded through the entry point that ``metadata.write_probe`` writes, and active only if
``BENCHMARK_PROBE`` names a folder. It appends one JSON line per load to ``loads.jsonl`` there, and
reads from ``way`` there which of three ways of loading to use, so that they can be compared within
one server:

``staged``    as shipped: parsed, merged and laid out on the device beside the loop
``prepared``  parsed and merged beside the loop, copied into the slot by the loop
``in-loop``   everything in the loop, as vLLM does it
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm_bucket_lora.config import SESSION_ENV

VARIABLE = "BENCHMARK_PROBE"
WAYS = ("staged", "prepared", "in-loop")


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    add = LRUCacheWorkerLoRAManager.add_adapter
    if hasattr(add, "_probe"):
        return
    path = Path(folder)

    @functools.wraps(add)
    def add_adapter(self: Any, lora_request: Any) -> Any:
        if lora_request.lora_int_id in self.list_adapters():
            return add(self, lora_request)  # before every step: must stay cheap
        started = time.perf_counter()
        added = add(self, lora_request)
        spent = time.perf_counter() - started
        line = {"time": time.time(), "name": lora_request.lora_name, "ms": spent * 1e3}
        with (path / "loads.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return added

    add_adapter._probe = True  # type: ignore[attr-defined]
    LRUCacheWorkerLoRAManager.add_adapter = add_adapter
    if os.environ.get(SESSION_ENV):
        _choose_way(path / "way")


def _choose_way(way: Path) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_bucket_lora import staging, worker

    worker.install()
    stage, prepare = staging.stage, getattr(WorkerBase, worker.PREPARE)

    def staged(manager: Any, lora: Any) -> None:
        if _read(way) == "staged":
            stage(manager, lora)

    def prepared(self: Any, *arguments: Any) -> None:
        if _read(way) != "in-loop":
            prepare(self, *arguments)

    staging.stage = staged
    setattr(WorkerBase, worker.PREPARE, prepared)


def _read(way: Path) -> str:
    return way.read_text() if way.exists() else WAYS[0]

"""A vLLM plugin that logs what the engine does: its steps, and what loads an adapter.

Loaded through the entry point that ``metadata.write_probe`` writes, and active only if
``BENCHMARK_PROBE`` names a folder. Two logs go there (see ``engine_log``): ``steps.txt``, a line
per engine step, and ``spans.jsonl``, a line per load and per preparation. It reads from ``way``
there which of four ways of loading to use, so that they can be compared within one server:

``staged``    as shipped: read in one piece and laid out on the device beside the loop
``parts``     the same, but tensor by tensor
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

from benchmarks.gpu.engine_log import FLUSH_S, SPANS, STEPS
from vllm_bucket_lora.config import SESSION_ENV

VARIABLE = "BENCHMARK_PROBE"
WAYS = ("staged", "parts", "prepared", "in-loop")


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(WorkerWrapperBase.execute_model, "_probe"):
        return
    path = Path(folder)
    _log_steps(WorkerWrapperBase, path / STEPS)
    _log_loads(LRUCacheWorkerLoRAManager, path / SPANS)
    if os.environ.get(SESSION_ENV):
        _log_preparations(path / SPANS)
        _choose_way(path / "way")


def _log_steps(worker: Any, path: Path) -> None:
    execute = worker.execute_model
    file = path.open("a", buffering=1 << 16)
    flushed = 0.0

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        nonlocal flushed
        if scheduler_output.total_num_scheduled_tokens:
            now = time.monotonic()
            requests = len(scheduler_output.num_scheduled_tokens)
            file.write(f"{now:.6f} {requests} {scheduler_output.total_num_scheduled_tokens}\n")
            if now - flushed > FLUSH_S:
                file.flush()
                flushed = now
        return execute(self, scheduler_output)

    execute_model._probe = True  # type: ignore[attr-defined]
    worker.execute_model = execute_model


def _log_loads(manager: Any, path: Path) -> None:
    add = manager.add_adapter

    @functools.wraps(add)
    def add_adapter(self: Any, lora_request: Any) -> Any:
        if lora_request.lora_int_id in self.list_adapters():
            return add(self, lora_request)  # before every step: must stay cheap
        started = time.monotonic()
        added = add(self, lora_request)
        _write_span(path, "load", lora_request.lora_name, started)
        return added

    manager.add_adapter = add_adapter


def _log_preparations(path: Path) -> None:
    from vllm_bucket_lora import worker

    build = worker.build

    @functools.wraps(build)
    def timed(manager: Any, read: Any, name: str, *arguments: Any) -> Any:
        started = time.monotonic()
        lora = build(manager, read, name, *arguments)
        _write_span(path, "prepare", name, started)
        return lora

    setattr(worker, "build", timed)  # noqa: B010 - mypy refuses an assignment


def _write_span(path: Path, kind: str, name: str, started: float) -> None:
    line = {"kind": kind, "name": name, "start": started, "ms": (time.monotonic() - started) * 1e3}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _choose_way(way: Path) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_bucket_lora import staging, worker

    worker.install()
    stage, prepare = staging.stage, getattr(WorkerBase, worker.PREPARE)
    read = worker._layouts.read

    def staged(manager: Any, lora: Any) -> None:
        if _read(way) in ("staged", "parts"):
            stage(manager, lora)

    def in_one_piece(*arguments: Any, **options: Any) -> Any:
        return read(*arguments, **options) if _read(way) == "staged" else None

    def prepared(self: Any, *arguments: Any) -> None:
        if _read(way) != "in-loop":
            prepare(self, *arguments)

    staging.stage = staged
    setattr(worker._layouts, "read", in_one_piece)  # noqa: B010
    setattr(WorkerBase, worker.PREPARE, prepared)


def _read(way: Path) -> str:
    return way.read_text() if way.exists() else WAYS[0]

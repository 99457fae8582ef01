"""vLLM's worker side: adapters are read beside the engine loop, and checked against the model.

Installed by the general plugin in every process that runs a model. A worker that does not share the
API server's files brings its own (``remote``). Two faults of vLLM are worked around here (a third
one in ``cpu_kernels``). It parses an adapter's files inside the engine loop, so that every request
waits. And it compares only the last part of a module's name with what the model knows: an adapter
with a wrong prefix loads without an error, changes nothing, and the server answers as the base
model.
"""

from __future__ import annotations

import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from adapter_bucket.errors import BucketError
from adapter_bucket.json_logs import set_up_logs
from adapter_bucket.stores import open_store
from vllm_bucket_lora import cpu_kernels, staging
from vllm_bucket_lora.config import SESSION_ENV, URL_ENV
from vllm_bucket_lora.layouts import PIECE, Layouts
from vllm_bucket_lora.prepared import Prepared, PreparedAdapters
from vllm_bucket_lora.remote import OwnCopies, is_elsewhere, is_ours

logger = logging.getLogger(__name__)

PREPARE = "bucket_lora_prepare"
PREPARED = "bucket_lora_prepared"
SHARES = "bucket_lora_shares"
"""Names of the worker methods that the API server calls."""

_FILES = "bucket_lora_files"
"""Attribute of an adapter that vLLM read: the directory of its files."""

_NAME = "bucket_lora_name"
"""Attribute of an adapter that vLLM read for us: whose weights these are."""

_prepared = PreparedAdapters()
_layouts = Layouts()
# One thread for ever: each new thread that uses torch would start a pool of threads of its own.
_thread = ThreadPoolExecutor(1, thread_name_prefix="bucket-lora-prepare")


def install() -> None:
    """Wrap three methods of ``WorkerLoRAManager``, add three worker methods. Idempotent.

    To be removed once vLLM reads adapters outside its loop, and refuses one of which it applies
    only a part. Neither holds for 0.32.
    """
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
    from vllm.v1.worker.worker_base import WorkerBase

    adopt_logging()
    cpu_kernels.install()
    original = WorkerLoRAManager._load_adapter
    if getattr(original, "_bucket_lora", False):
        return
    fetched: dict[int, set[str]] = {}
    read = functools.partial(read_adapter, original, fetched)

    @functools.wraps(original)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        number, name = lora_request.lora_int_id, lora_request.lora_name
        ready = _prepared.take(number, name, lora_request.lora_path)
        if ready is not None and ready.exception() is None:
            return ready.result()
        return read(self, lora_request)  # fails again, if it did, with vLLM's own error

    remove = WorkerLoRAManager.remove_adapter

    @functools.wraps(remove)
    def remove_adapter(self: Any, adapter_id: int) -> Any:
        never_loaded = _prepared.give_up(adapter_id)
        staging.drop_unless(self._adapter_manager, _prepared)
        for name in fetched.pop(adapter_id, ()):
            if name == never_loaded:  # a retry finds its files here, and need not fetch them
                fetched[adapter_id] = {name}
            else:
                _thread.submit(_copies().forget, name)
        return remove(self, adapter_id)

    staging.install()
    _load_adapter._bucket_lora = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter
    WorkerLoRAManager.remove_adapter = remove_adapter
    for manager in (WorkerLoRAManager, LRUCacheWorkerLoRAManager):
        _refuse_twins(manager)
    _add_worker_methods(WorkerBase, read)


def _refuse_twins(manager: Any) -> None:
    """Have ``add_adapter`` compare names: it takes another adapter of the number for this one."""
    add = manager.add_adapter

    @functools.wraps(add)
    def add_adapter(self: Any, request: Any) -> Any:
        held = self._adapter_manager.get_adapter(request.lora_int_id)
        name = getattr(held, _NAME, None)
        if held is not None and name != request.lora_name and (name or is_ours(request.lora_path)):
            raise ValueError(
                f"the engine still has {name or 'an adapter of another origin'} under the number "
                f"of {request.lora_name} ({request.lora_int_id}), and would serve its weights; "
                "restart the server, or choose another run id"
            )
        return add(self, request)

    manager.add_adapter = add_adapter


def _session() -> str:
    """This machine's directory; empty in an engine that ``follow`` uses.

    Looked up when it is needed: where engines are forked, the hooks are older than the session.
    """
    return os.environ.get(SESSION_ENV, "")


@functools.cache
def _copies() -> OwnCopies:
    """What this machine fetched by itself."""
    return OwnCopies(Path(_session()) / "workers", lambda: open_store(os.environ[URL_ENV]))


def _add_worker_methods(worker: Any, read: Any) -> None:
    def prepare(self: Any, name: str, number: int, path: str) -> None:
        manager = self.model_runner.lora_manager
        if _prepared.expects(number, name, path) or number in manager.list_adapters():
            return
        _prepared.make_room()
        staging.drop_unless(manager._adapter_manager, _prepared)
        adapter = _thread.submit(build, manager, read, name, number, path)
        _prepared.put(number, Prepared(name, path, adapter))

    def prepared(self: Any, number: int) -> bool | str:
        """Whether it is read; a text says why not, where another attempt may succeed."""
        future = _prepared.find(number)
        if future is None or not future.done():
            return future is None
        error = future.exception()
        if isinstance(error, BucketError):
            _prepared.drop(number)
            return f"{type(error).__name__}: {error}"
        return True

    def shares(self: Any, path: str) -> bool:
        """Whether this worker reads the API server's own files."""
        return not is_elsewhere(path, _session())

    setattr(worker, PREPARE, prepare)
    setattr(worker, PREPARED, prepared)
    setattr(worker, SHARES, shares)


def read_adapter(original: Any, fetched: dict[int, set[str]], manager: Any, request: Any) -> Any:
    """Read an adapter's files, wherever they are, and compare its modules with the model's.

    Args:
        original: vLLM's own reading.
        fetched: Names of the adapters that this machine fetched by itself, by number.
        manager: vLLM's manager of this worker.
        request: vLLM's request for the adapter.
    """
    ours = is_ours(request.lora_path)
    if is_elsewhere(request.lora_path, _session()):
        fetched.setdefault(request.lora_int_id, set()).add(request.lora_name)
        path = _copies().path(request.lora_name)
        request = msgspec.structs.replace(request, lora_path=str(path))
    if ours:
        pin = manager.device.type == "cuda"
        known = _layouts.read(request.lora_int_id, Path(request.lora_path), pin=pin)
        if known is not None:
            setattr(known, _NAME, request.lora_name)
            return known
    lora = original(manager, request)
    if ours:
        setattr(lora, _NAME, request.lora_name)
        setattr(lora, _FILES, Path(request.lora_path))
        own = manager._adapter_manager
        check_modules(lora.loras, own, elsewhere=layers_elsewhere(own.model))
    return lora


def layers_elsewhere(model: Any) -> tuple[str, ...]:
    """Prefixes of the modules that other ranks of a pipeline have, and check."""
    from vllm.model_executor.models.utils import PPMissingLayer

    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in modules if isinstance(module, PPMissingLayer))


def build(manager: Any, read: Any, name: str, number: int, path: str) -> Any:
    """Read an adapter, merge packed modules, stage it: what needs no place in the engine loop.

    vLLM merges once more while adding the adapter, and finds nothing left to do. For mixtures of
    experts it would find something, so there the merge is left to vLLM.
    """
    import torch
    from vllm.lora.request import LoRARequest

    if manager.device.type == "cuda":
        torch.cuda.set_device(manager.device)  # else pinning memory opens a context on device 0
    lora = read(manager, LoRARequest(lora_name=name, lora_int_id=number, lora_path=path))
    if not manager._adapter_manager._is_moe:
        if not hasattr(lora, PIECE):
            manager._adapter_manager._create_merged_loras_inplace(lora)
            if hasattr(lora, _FILES):
                _layouts.learn(getattr(lora, _FILES), lora)
        staging.stage(manager._adapter_manager, lora)
    return lora


def check_modules(adapter_modules: Any, manager: Any, *, elsewhere: tuple[str, ...] = ()) -> None:
    """Compare an adapter's modules with those that the model has.

    Names inside fused experts are left to vLLM, which renames them while loading.

    Args:
        adapter_modules: Their names.
        manager: vLLM's ``LoRAModelManager``.
        elsewhere: What the names of modules begin with that other workers have.

    Raises:
        ValueError: some have no counterpart; the message names the first ones.
    """
    known = set(manager.modules)
    for parts in manager.packed_modules.values():  # qkv_proj: q_proj, k_proj, v_proj
        known.update(parts)
    unknown = sorted(
        name
        for name in set(adapter_modules) - known
        if ".experts" not in name and not name.startswith(elsewhere)
    )
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if unknown[3:] else "")
        raise ValueError(
            f"the served model has no module {shown}; publish the adapter with the module names of "
            "the base model as transformers loads it"
        )


def adopt_logging() -> None:
    """Send our log lines where vLLM's go, in its format: it configures no other logger."""
    if set_up_logs("replica"):
        return
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_bucket_lora")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)

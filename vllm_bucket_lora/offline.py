"""The newest version of a run in vLLM's offline ``LLM``, for notebooks and evaluation jobs.

::

    llm = LLM("org/model", enable_lora=True, max_lora_rank=16)
    with follow(llm, "s3://bucket/prefix", "my-run") as run:
        outputs = llm.generate(prompts, lora_request=run.newest(wait_s=60))
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapter_bucket.errors import ConfigError, NotPublished
from adapter_bucket.fetch import RunReader
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import Manifest, VersionEntry
from adapter_bucket.probe import Probe
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from vllm_bucket_lora.acceptance import Served, run_fault, version_fault
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.names import Names, reused_fault
from vllm_bucket_lora.ports import LoadRefused
from vllm_bucket_lora.session import create_session, remove_session

logger = logging.getLogger(__name__)

POLL_S = 0.5


class Follower:
    """One run, as one ``LLM`` object generates with it. Not thread-safe, like ``LLM`` itself.

    Holds one version in the engine at a time. A context manager: its end removes the local files.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        served: Served,
        add: Callable[[str, Path], Any],
        remove: Callable[[str], None],
        prove: Callable[[Any, Probe], None] = lambda request, probe: None,
        cache_dir: Path | None = None,
    ) -> None:
        """Follow ``run_id``.

        Args:
            store: Where the run lives.
            run_id: The run.
            served: What the engine can take.
            add: Loads an adapter into the engine and returns vLLM's request for it.
            remove: Takes an adapter out of the engine.
            prove: Has the engine evaluate a probe with a request; raises ``ProbeFailed``.
            cache_dir: Where files go; memory if the machine offers it.
        """
        self._reader = RunReader(store, run_id)
        self._names = Names()
        self._run_id = run_id
        self._served = served
        self._add = add
        self._remove = remove
        self._prove = prove
        self._session = create_session(cache_dir)
        self._cache = VersionCache(store, self._session.path)
        self._current: tuple[VersionEntry, Any] | None = None

    @property
    def version(self) -> int:
        """The version that the last request was made for; 0 before the first one."""
        return self._current[0].version if self._current else 0

    def newest(self, *, wait_s: float = 0.0) -> Any:
        """Load the newest published version, unless it is loaded, and return its ``LoRARequest``.

        Args:
            wait_s: How long to wait for a first version.

        Raises:
            NotPublished: the run has no version, also not within ``wait_s``.
            ConfigError: the engine cannot serve the run; the message says what to change.
            LoadRefused: the version's bytes are no adapter for this model.
            ProbeFailed: the engine does not compute with it as the trainer does. The version that
                was loaded before stays loaded.
            IntegrityError: the bytes differ from what the manifest promises.
            StoreUnavailable: the bucket does not answer; call again.
        """
        entry = self._wait_for_entry(time.monotonic() + wait_s)
        if self._current is not None and self._current[0].version == entry.version:
            return self._current[1]
        if fault := version_fault(entry, self._served):
            raise ConfigError(f"{self._name(entry)} cannot be served: {fault}")
        path = self._cache.fetch(self._run_id, entry)
        try:
            request = self._load(entry, path)
        except BaseException:
            self._cache.remove(self._run_id, entry.version)
            raise
        old, self._current = self._current, (entry, request)
        if old is not None:
            self._remove(self._name(old[0]))
            self._cache.remove(self._run_id, old[0].version)
        logger.info("generating with %s", self._name(entry))
        return request

    def _load(self, entry: VersionEntry, path: Path) -> Any:
        request = self._add(self._name(entry), path)
        if entry.probe is not None:
            try:
                self._prove(request, entry.probe)
            except BaseException:
                self._remove(self._name(entry))
                raise
        return request

    def close(self) -> None:
        """Take the adapter out of the engine and delete the local files."""
        if self._current is not None:
            self._remove(self._name(self._current[0]))
            self._current = None
        remove_session(self._session)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_entry(self, deadline: float) -> VersionEntry:
        while True:
            try:
                manifest = self._reader.poll() or self._reader.manifest
            except NotPublished:
                manifest = None
            if manifest is not None and manifest.versions:
                return self._newest_entry(manifest)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotPublished(
                    f"run {self._run_id!r} has no version yet; start its trainer, or call "
                    "newest(wait_s=…) to wait for it"
                )
            time.sleep(min(POLL_S, left_s))

    def _newest_entry(self, manifest: Manifest) -> VersionEntry:
        if fault := run_fault(manifest, self._served):
            raise ConfigError(f"run {self._run_id!r} does not fit: {fault}")
        entry = manifest.versions[-1]
        if entry.version in self._names.learn(manifest):
            fault = reused_fault(self._run_id, entry.version)
            raise ConfigError(f"{self._name(entry)} cannot be served: {fault}")
        return entry

    def _name(self, entry: VersionEntry) -> str:
        return adapter_name(self._run_id, entry.version)


def follow(
    llm: Any,
    url: str,
    run_id: str,
    *,
    base_model: str | None = None,
    cache_dir: Path | None = None,
) -> Follower:
    """Follow a run with an offline ``LLM``.

    Args:
        llm: A ``vllm.LLM`` made with ``enable_lora=True``.
        url: The bucket, ``s3://…`` or ``file://…``.
        run_id: The run.
        base_model: The base model's name as the trainer writes it; by default as given to ``llm``.
        cache_dir: Where files go; memory if the machine offers it.

    Raises:
        ConfigError: LoRA is off, or the URL is wrong.
    """
    from vllm.lora.request import LoRARequest

    from vllm_bucket_lora.engine import describe_server, stable_id
    from vllm_bucket_lora.prober import check_offline

    _install_worker_side(llm)
    engine = llm.llm_engine
    config = engine.vllm_config

    def add(name: str, path: Path) -> Any:
        request = LoRARequest(lora_name=name, lora_int_id=stable_id(name), lora_path=str(path))
        try:
            added = engine.add_lora(request)
        except Exception as error:
            raise LoadRefused(f"vLLM does not load {name}: {error}") from error
        if not added:
            raise LoadRefused(f"vLLM did not add {name}, and gave no reason; see its log")
        return request

    return Follower(
        open_store(url),
        run_id,
        served=describe_server(config, base_model or config.model_config.model),
        add=add,
        remove=lambda name: engine.remove_lora(stable_id(name)),
        prove=lambda request, probe: check_offline(llm, request, probe),
        cache_dir=cache_dir,
    )


def _install_worker_side(llm: Any) -> None:
    """Make sure that the engine compares module names with the model's own.

    An engine in a process of its own did it when it started; one in this process is told now.
    """
    from vllm_bucket_lora.worker import SHARES, install

    if "vllm.lora.worker_manager" in sys.modules:
        install()
    try:
        llm.collective_rpc(SHARES, args=("",))
    except Exception:
        logger.warning(
            "the engine's processes did not load this plugin, so module names of adapters are not "
            "compared with the model's; put 'bucket-lora' into VLLM_PLUGINS"
        )

"""Weight sync of one training run: snapshot, publisher and readiness put together.

Owns what happens on which rank. Knows PEFT models and the bucket; knows nothing of TRL, so that any
trainer can drive it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adapter_bucket.base_model import BaseModelRef, architecture_fingerprint
from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.stores import open_store
from trl_async_bucket.adapter_config import largest_rank, portable_config
from trl_async_bucket.checks import check_adapter_config, check_replicas, serving_dtype
from trl_async_bucket.publisher import Publisher, Snapshot, SyncRecord
from trl_async_bucket.readiness import ReplicaClient
from trl_async_bucket.snapshot import SnapshotBuffer, full_tensors, lora_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """Settings of a bucket sync; the trainer's config fields of the same names, checked."""

    bucket_url: str
    run_id: str
    takeover: bool
    dtype: str
    ready: str
    max_lag: int
    keep_every: int
    base_model: str | None
    window: int
    """Versions replicas keep ready: ``max_staleness + 2``."""
    server_url: str
    """A replica, or the proxy."""
    timeout_s: float


class BucketSync:
    """One run's way into the bucket. Lives on rank 0; other ranks use ``gather`` only.

    The constructor checks everything that can be checked before the first step and writes nothing.
    ``start`` claims the run.

    Args:
        model: The ``peft.PeftModel``.
        adapter: PEFT's name of the adapter that is trained.
        settings: See ``SyncSettings``.
        on_ready: Told each version that rollouts may ask for; called on the publisher's thread.

    Raises:
        ConfigError: bucket, adapter or replicas cannot work together; says what to change.
    """

    def __init__(
        self,
        model: Any,
        adapter: str,
        settings: SyncSettings,
        *,
        on_ready: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._parameters = lora_parameters(model, adapter)
        self._base_model = base_model_ref(model, settings.base_model)
        self._adapter_config = portable_config(
            model.peft_config[adapter],
            module_names=self._parameters,
            base_model=self._base_model.id,
        )
        check_adapter_config(self._adapter_config)
        self._rank = largest_rank(self._parameters)
        self._replicas = ReplicaClient(settings.server_url)
        alive = self._replicas.replicas()
        check_replicas(alive, base_model=self._base_model, rank=self._rank, window=settings.window)
        self._dtype = settings.dtype if settings.dtype != "auto" else serving_dtype(alive)
        self._store = open_store(settings.bucket_url)
        self._writer: RunWriter | None = None
        self._publisher: Publisher | None = None
        self._taken_version = 0

    @property
    def latest(self) -> int:
        """Newest version in the bucket. Call after ``start``."""
        return self._running()[0].manifest.latest

    @property
    def taken_version(self) -> int:
        """Version of the newest snapshot; 0 before the first since ``start``."""
        return self._taken_version

    @property
    def lag(self) -> int:
        """How many versions the newest snapshot is ahead of the newest ready version."""
        ready = self._running()[1].ready_version
        return self._taken_version - ready if ready else 0

    def take_records(self) -> list[SyncRecord]:
        """Records of the syncs finished since the last call."""
        return self._publisher.take_records() if self._publisher else []

    @property
    def skipped(self) -> int:
        """Snapshots replaced by a newer one before they were published."""
        return self._publisher.skipped if self._publisher else 0

    def start(self) -> None:
        """Claim the run and start the publisher.

        Raises:
            FencedError: the run belongs to another trainer.
        """
        settings = self._settings
        self._taken_version = 0
        self._writer = RunWriter.claim(
            self._store,
            settings.run_id,
            base_model=self._base_model,
            window=settings.window,
            writer_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            takeover=settings.takeover,
            keep_every=settings.keep_every,
        )
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        dtype = getattr(torch, self._dtype)
        buffers = tuple(
            SnapshotBuffer(shapes, dtype=dtype, pin_memory=torch.cuda.is_available())
            for _ in range(2)
        )
        self._publisher = Publisher(
            publish=self._publish,
            wait_ready=self._wait_ready,
            on_ready=self._on_ready,
            buffers=(buffers[0], buffers[1]),
            timeout_s=settings.timeout_s,
        )
        logger.info(
            "bucket sync: run %s in %s, epoch %d, versions from %d, %d tensors as %s, %d bytes",
            settings.run_id,
            self._store.url,
            self._writer.manifest.writer.epoch,
            self._writer.manifest.latest + 1,
            len(shapes),
            self._dtype,
            buffers[0].nbytes,
        )

    def take(self, tensors: dict[str, torch.Tensor], *, version: int, step: int) -> float:
        """Snapshot and hand over. The only call the optimizer loop waits for.

        Returns:
            Seconds the snapshot took.
        """
        _, publisher = self._running()
        started = time.perf_counter()
        buffer = publisher.reserve()
        assert isinstance(buffer, SnapshotBuffer)
        buffer.fill(tensors)
        snapshot_s = time.perf_counter() - started
        publisher.submit(Snapshot(version, step, buffer, time.monotonic()))
        self._taken_version = version
        return snapshot_s

    def wait_lag(self, max_lag: int | None = None) -> float:
        """Wait while the newest snapshot is too far ahead of the replicas; seconds waited."""
        limit = self._settings.max_lag if max_lag is None else max_lag
        _, publisher = self._running()
        return publisher.wait_lag(self._taken_version, limit, self._settings.timeout_s)

    def finish(self) -> None:
        """Publish what is pending, then mark the run finished."""
        writer, publisher = self._running()
        publisher.close(drain=True, timeout_s=self._settings.timeout_s)
        writer.close(RunState.FINISHED)
        self._writer = None

    def interrupt(self) -> None:
        """Stop without draining and mark the run interrupted, as far as the bucket answers."""
        if self._writer is None or self._publisher is None:
            return
        self._publisher.close(drain=False, timeout_s=30.0)
        self._writer.close(RunState.INTERRUPTED)
        self._writer = None

    def gather(self) -> dict[str, torch.Tensor]:
        """Whole LoRA tensors. A collective where parameters are sharded."""
        return full_tensors(self._parameters)

    def _running(self) -> tuple[RunWriter, Publisher]:
        if self._writer is None or self._publisher is None:
            raise ConfigError("the bucket sync is not started, or has ended")
        return self._writer, self._publisher

    def _publish(self, snapshot: Snapshot) -> None:
        writer, _ = self._running()
        if writer.manifest.latest >= snapshot.version:
            return  # committed by an attempt whose answer was lost
        writer.publish(
            snapshot.version,
            step=snapshot.step,
            weights=snapshot.buffer.data(),
            adapter_config=self._adapter_config,
            rank=self._rank,
            dtype=self._dtype,
        )

    def _wait_ready(self, version: int, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        return self._replicas.wait_ready(
            adapter_name(self._settings.run_id, version),
            need=self._settings.ready,
            timeout_s=timeout_s,
            should_stop=should_stop,
        )


def base_model_ref(model: Any, override: str | None) -> BaseModelRef:
    """Reference of the base model under a ``peft.PeftModel``."""
    config = model.config
    return BaseModelRef(
        id=override or config._name_or_path or "unknown",
        revision=getattr(config, "_commit_hash", None),
        architecture=architecture_fingerprint(config.to_dict()),
    )

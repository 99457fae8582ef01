"""Weight sync of one training run: snapshot, publisher and readiness put together.

Owns what happens on which rank. Knows PEFT models and the bucket; knows nothing of TRL, so that any
trainer can drive it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import RunState
from adapter_bucket.probe import Probe
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from trl_async_bucket.adapter_config import largest_rank, portable_config
from trl_async_bucket.checks import check_adapter_config, check_trained
from trl_async_bucket.claim import claim_run
from trl_async_bucket.fleet import TrainedModel, base_model_ref, connect
from trl_async_bucket.publish_retries import finish_with_retries
from trl_async_bucket.publisher import Publisher
from trl_async_bucket.settings import SyncSettings
from trl_async_bucket.snapshot import Shards, SnapshotBuffer, full_shape, lora_parameters
from trl_async_bucket.sync_record import Snapshot, SyncRecord
from trl_async_bucket.sync_trace import observe_syncs

logger = logging.getLogger(__name__)

LAG_MARGIN_S = 5.0

INTERRUPT_WAIT_S = 30.0
"""How long an interrupted trainer waits for the upload in hand before it ends."""


class BucketSync:
    """One run's way into the bucket. Lives on rank 0.

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
        on_ready: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._on_synced = observe_syncs(settings.run_id)
        self._settings = settings
        self._on_ready = on_ready
        self._base_model = base_model_ref(model, settings.base_model)
        own = f".{adapter}."
        self._adapter_config = portable_config(
            model.peft_config[adapter],
            module_names=[
                n for n, _ in model.named_parameters() if own in n.partition(".lora_")[2]
            ],
            base_model=self._base_model.id,
        )
        # First: its error names the field, where the one about parameters names a tensor.
        check_adapter_config(self._adapter_config)
        check_trained(model, adapter)
        parameters = lora_parameters(model, adapter)
        self._shapes = {name: full_shape(p) for name, p in parameters.items()}
        self._rank = largest_rank(self._shapes)
        self._store = open_store(settings.bucket_url)
        trained = TrainedModel.of(model, self._base_model, self._rank)
        self._fleet = connect(settings, self._store, trained)
        self._writer: RunWriter | None = None
        self._publisher: Publisher | None = None
        self._taken_version = 0
        self._trained = False
        self._ending = threading.Lock()  # held by the trainer or the deadline's thread

    @property
    def running(self) -> bool:
        """Whether the run is claimed and versions may be published."""
        return self._writer is not None

    @property
    def store(self) -> Store:
        """The bucket."""
        return self._store

    @property
    def writer(self) -> RunWriter:
        """The run's writer. Call after ``start``."""
        return self._running()[0]

    @property
    def dtype(self) -> str:
        """dtype of the published adapters, without ``torch.``."""
        return self._fleet.dtype

    @property
    def logprobs_mode(self) -> str:
        """``--logprobs-mode`` of the replicas."""
        return self._fleet.logprobs_mode

    @property
    def next_version(self) -> int:
        """Lowest version number that may be published. Call after ``start``."""
        return self._running()[0].next_version

    @property
    def taken_version(self) -> int:
        """Version of the newest snapshot; 0 before the first. ``wait_lag`` may raise it."""
        return self._taken_version

    @property
    def lag(self) -> int:
        """How many versions the newest snapshot is ahead of the newest ready version."""
        ready = self._running()[1].ready_version
        return self._taken_version - ready if ready else 0

    def check(self) -> None:
        """Raise whatever stopped the publisher: for a trainer that waits for something else."""
        if self._publisher is not None:
            self._publisher.check()

    def replicas_fault(self) -> str | None:
        """Why no replica can be asked; ``None`` if one answers, or none is ever asked."""
        return self._fleet.fault()

    def take_records(self) -> list[SyncRecord]:
        """Records of the syncs finished since the last call."""
        return self._publisher.take_records() if self._publisher else []

    @property
    def skipped(self) -> int:
        """Snapshots replaced by a newer one before they were published."""
        return self._publisher.skipped if self._publisher else 0

    @property
    def passed_over(self) -> int:
        """Versions that no replica could verify, and that others were published in place of."""
        return self._publisher.passed_over if self._publisher else 0

    def start(self, *, takeover: bool = False) -> None:
        """Claim the run, with ``takeover`` also one marked running, and start the publisher.

        Raises:
            FencedError: the run belongs to another trainer.
        """
        settings = self._settings
        self._taken_version = 0
        # Before the claim: what can fail must not leave a run behind that is marked running.
        dtype = getattr(torch, self._fleet.dtype)
        first, second = (
            SnapshotBuffer(self._shapes, dtype=dtype, pin_memory=torch.cuda.is_available())
            for _ in range(2)
        )
        self._writer = claim_run(
            self._store, settings, self._base_model, takeover=takeover or settings.takeover
        )
        self._publisher = Publisher(
            publish=partial(self._publish, self._writer),
            wait_ready=self._wait_ready,
            on_ready=self._on_ready,
            buffers=(first, second),
            timeout_s=settings.timeout_s,
            on_synced=self._on_synced,
        )
        logger.info(
            "bucket sync: run %s in %s, epoch %d, versions from %d, %d tensors as %s, %d bytes",
            settings.run_id, self._store.url, self._writer.manifest.writer.epoch,
            self._writer.next_version, len(self._shapes), self._fleet.dtype, first.nbytes,
        )  # fmt: skip

    def take(
        self,
        tensors: Mapping[str, torch.Tensor | Shards],
        *,
        version: int,
        step: int,
        probe: Probe | None = None,
    ) -> float:
        """Snapshot and hand over. The only call the optimizer loop waits for.

        While all B factors are zero (before the first gradient, in a warm-up step) the adapter is
        the untrained policy, and is published as that: step 0.

        Args:
            tensors: What ``AdapterGather.gather`` returned.
            version: Greater than every one before, and at least ``next_version``.
            step: Optimizer steps taken so far.
            probe: What the model computes with these very tensors.

        Returns:
            Seconds the snapshot took.
        """
        _, publisher = self._running()
        started = time.perf_counter()
        buffer = publisher.reserve()
        assert isinstance(buffer, SnapshotBuffer)
        buffer.fill(tensors)
        snapshot_s = time.perf_counter() - started
        self._trained = self._trained or buffer.has_effect()
        step = step if self._trained else 0
        publisher.submit(Snapshot(version, step, buffer, time.monotonic(), probe, snapshot_s))
        self._taken_version = version
        return snapshot_s

    def wait_lag(self, max_lag: int | None = None) -> float:
        """Wait while the newest snapshot is too far ahead of the replicas; seconds waited.

        One that no replica could verify is published again meanwhile, as the next version.
        """
        limit = self._settings.max_lag if max_lag is None else max_lag
        _, publisher = self._running()
        # Longer than the publisher's own limit: its error names the cause and should come first.
        timeout_s = self._settings.timeout_s + LAG_MARGIN_S
        waited_s = publisher.wait_lag(limit, timeout_s)
        self._taken_version = publisher.newest_version
        return waited_s

    def finish(self) -> None:
        """Publish what is pending, then mark the run finished.

        Raises:
            StoreUnavailable: the bucket stayed away for the time limit of a version.
        """
        writer, publisher = self._running()
        timeout_s = self._settings.timeout_s
        # Twice: one version may be under way and one waiting, each with a limit of its own.
        deadline = time.monotonic() + 2 * timeout_s
        publisher.close(drain=True, timeout_s=2 * timeout_s)
        finish_with_retries(
            self._mark_finished,
            limit_s=min(timeout_s, deadline - time.monotonic()),
            done=f"its last version, {writer.manifest.latest}, is published",
            command=f"bucket-lora finish {self._store.url} {self._settings.run_id}",
        )

    def _mark_finished(self) -> None:
        # Held for one attempt: whoever ends the run between two of them need not wait.
        with self._ending:
            writer, _ = self._running()  # not if it was interrupted meanwhile, and so not drained
            writer.close(RunState.FINISHED)
            self._writer = None

    def publish_pending(self, timeout_s: float) -> bool:
        """Before an early end: publish the newest snapshot, without waiting for readiness.

        Returns:
            Whether it is in the bucket, after ``timeout_s`` at most.
        """
        return self._publisher is None or self._publisher.flush(timeout_s)

    def interrupt(self) -> None:
        """Stop without draining and mark the run interrupted, if it is running. Thread-safe: when
        it returns the run is closed, whoever closed it.

        Raises:
            StoreUnavailable: an upload did not end within ``INTERRUPT_WAIT_S``: the writer is busy
                and the run stays marked running.
        """
        with self._ending:
            if self._writer is None or self._publisher is None:
                return
            writer, self._writer = self._writer, None
            # The writer belongs to the publisher's thread until that writes no more.
            self._publisher.close(drain=False, timeout_s=INTERRUPT_WAIT_S)
            writer.close(RunState.INTERRUPTED)

    def _running(self) -> tuple[RunWriter, Publisher]:
        if self._writer is None or self._publisher is None:
            raise ConfigError("the bucket sync is not started, or has ended")
        return self._writer, self._publisher

    def _publish(self, writer: RunWriter, snapshot: Snapshot) -> None:
        if writer.manifest.latest >= snapshot.version:
            return  # committed by an attempt whose answer was lost
        writer.publish(
            snapshot.version,
            step=snapshot.step,
            weights=snapshot.buffer.data(),
            adapter_config=self._adapter_config,
            rank=self._rank,
            dtype=self._fleet.dtype,
            probe=snapshot.probe,
        )

    def _wait_ready(self, version: int, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        if self._fleet.readiness is None or self._settings.ready.kind == "none":
            return not should_stop()
        return self._fleet.readiness.wait_ready(
            adapter_name(self._settings.run_id, version),
            policy=self._settings.ready,
            timeout_s=timeout_s,
            should_stop=should_stop,
        )

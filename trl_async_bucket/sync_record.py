"""One version on its way from the trainer to the rollouts, and what its sync cost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from adapter_bucket.json_logs import about
from adapter_bucket.probe import Probe
from adapter_bucket.store import Payload

logger = logging.getLogger(__name__)


class SnapshotLike(Protocol):
    """What the publisher needs of a snapshot buffer."""

    def data(self) -> Payload:
        """The safetensors file."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """One filled buffer on its way to the bucket."""

    version: int
    step: int
    buffer: SnapshotLike
    taken_at: float
    """``time.monotonic`` when it was complete, seconds."""
    probe: Probe | None = None
    snapshot_s: float = 0.0
    """How long it took, seconds."""


@dataclass(frozen=True)
class SyncTimes:
    """When the parts of one version's sync ended, by ``time.monotonic``."""

    snapshot: Snapshot
    upload_began_at: float
    committed_at: float
    ready_at: float


@dataclass(frozen=True)
class SyncRecord:
    """What one version's sync cost, for the metrics."""

    version: int
    nbytes: int
    publish_s: float
    """From the start of the upload to the commit of the manifest."""
    ready_s: float
    """From the snapshot to ready, the queueing before the upload included."""

    def log(self) -> None:
        """One line, once the version is ready."""
        logger.info(
            "version %d ready: %d bytes, published in %.3f s, ready %.3f s after the snapshot",
            self.version,
            self.nbytes,
            self.publish_s,
            self.ready_s,
            extra=about(version=self.version),
        )

"""What a replica writes into the bucket about itself, and how others tell that it is alive.

A heartbeat is an object of its own per run and replica, overwritten by that replica alone: no
conditions, no history. One more belongs to no run: it says that the replica is there before there
is any run to serve, which is when a trainer looks for its servers. Nobody compares clocks of two
machines: a reader calls a replica alive while the *content* keeps changing within the interval the
replica announced, by the reader's own clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, Field, ValidationError

from adapter_bucket.errors import BucketError, IntegrityError, ObjectNotFound
from adapter_bucket.layout import heartbeat_key, parse_heartbeat_key, replicas_prefix
from adapter_bucket.manifest import FORMAT_VERSION, RunId, brief
from adapter_bucket.status import ReplicaStatus
from adapter_bucket.store import NotModified, Store
from adapter_bucket.wire import MAX_INT, READABLE

logger = logging.getLogger(__name__)

MAX_HEARTBEAT_BYTES = 256 * 1024
"""A heartbeat is 1 to 2 KB."""

MAX_REPLICAS = 4096
"""More heartbeats than this are not read: somebody fills the bucket."""

ABANDONED_S = 24 * 3600.0
"""Age at which a heartbeat without a run is deleted: far above any interval."""

MISSED = 3
"""Intervals without a change after which a replica counts as gone."""


class Heartbeat(BaseModel):
    """One replica, as it sees itself."""

    model_config = READABLE

    format_version: int = FORMAT_VERSION
    run_id: RunId | None = None
    """``None``: that of the replica itself, whatever it serves; ``status`` then has no runs."""
    replica_id: RunId
    """Follows the rules of a run id: it is part of the key."""
    url: str = Field(max_length=2048)
    """Where the proxy reaches the replica's API, ``https://host:port``."""
    sequence: int = Field(ge=0, le=MAX_INT)
    """Counts up with every write, so that no two in a row are equal."""
    interval_s: float = Field(gt=0, le=86400)
    """How often the replica writes, seconds."""
    written_at: float = Field(ge=0, le=1e11)
    """Unix time by the replica's clock, seconds. For people; never compared."""
    status: ReplicaStatus
    """What ``GET /bucket_lora/status`` answers: versions ready, slots, max rank, dtype, errors."""


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Serialise to the bytes that go into the bucket."""
    return heartbeat.model_dump_json(indent=1).encode()


def decode_heartbeat(data: bytes, *, run_id: str | None, replica_id: str) -> Heartbeat:
    """Parse and check a heartbeat.

    Raises:
        IntegrityError: it is too large, malformed, of another major version, or says it belongs to
            another run or replica than its key.
    """
    subject = f"heartbeat of replica {replica_id!r}"
    if len(data) > MAX_HEARTBEAT_BYTES:
        raise IntegrityError(f"{subject} has {len(data)} bytes; the limit is {MAX_HEARTBEAT_BYTES}")
    try:
        heartbeat = Heartbeat.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{subject} is not valid: {brief(error)}") from None
    if heartbeat.format_version != FORMAT_VERSION:
        raise IntegrityError(
            f"{subject} has format_version {str(heartbeat.format_version)[:20]}; this version "
            f"reads {FORMAT_VERSION}"
        )
    if (heartbeat.run_id, heartbeat.replica_id) != (run_id, replica_id):
        raise IntegrityError(f"{subject} belongs to another run or replica")
    return heartbeat


def write_heartbeat(store: Store, heartbeat: Heartbeat) -> None:
    """Write a replica's heartbeat over its last one.

    Raises:
        StoreUnavailable: the store failed; the next interval tries again.
    """
    key = heartbeat_key(heartbeat.run_id, heartbeat.replica_id)
    store.overwrite(key, encode_heartbeat(heartbeat))


def remove_heartbeat(store: Store, run_id: str | None, replica_id: str) -> None:
    """Take a replica off the list at its orderly end."""
    store.delete([heartbeat_key(run_id, replica_id)])


def remove_abandoned(store: Store) -> int:
    """Delete the run-less heartbeats of replicas that were killed long ago; returns how many.

    Those of a run go with the run. These would stay for ever: a spot replica that starts again has
    another id.
    """
    before = store.now() - ABANDONED_S
    keys = [
        info.key
        for info in store.scan(replicas_prefix(None))
        if parse_heartbeat_key(info.key) is not None and info.modified_at < before
    ]
    store.delete(keys)
    return len(keys)


@dataclass(frozen=True)
class Seen:
    """A replica as a reader knows it."""

    heartbeat: Heartbeat
    unchanged_s: float
    """For how long the reader has seen no new heartbeat, seconds."""

    @property
    def alive(self) -> bool:
        """Whether it wrote within ``MISSED`` of its own intervals."""
        return self.unchanged_s <= MISSED * self.heartbeat.interval_s


@dataclass
class _Known:
    etag: str
    heartbeat: Heartbeat
    changed_at: float


class HeartbeatReader:
    """Follows the heartbeats of one run, or with ``None`` those of all replicas. Not thread-safe.

    A poll costs one listing and a conditional GET per replica. A malformed heartbeat costs one log
    line when it appears, and hides nothing else.
    """

    def __init__(
        self, store: Store, run_id: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._subject = "the bucket" if run_id is None else f"run {run_id}"
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self.faults: dict[str, str] = {}
        """By replica id: why its heartbeat cannot be read."""

    def poll(self) -> dict[str, Seen]:
        """Read what changed; replicas whose heartbeat is gone are forgotten.

        Returns:
            By replica id, also those that are not alive any more.

        Raises:
            StoreUnavailable: the listing failed; poll again.
        """
        keys = self._store.list(replicas_prefix(self._run_id))
        ids = sorted(name for name in map(parse_heartbeat_key, keys) if name is not None)
        if len(ids) > MAX_REPLICAS:
            logger.warning(
                "%s has %d heartbeats; only %d are read", self._subject, len(ids), MAX_REPLICAS
            )
        faults: dict[str, str] = {}
        known = {name: self._known[name] for name in ids[:MAX_REPLICAS] if name in self._known}
        for replica_id in ids[:MAX_REPLICAS]:
            try:
                self._read(replica_id, known)
            except BucketError as error:
                faults[replica_id] = str(error)
                if replica_id not in self.faults:
                    logger.warning("%s: %s", self._subject, error)
        self._known, self.faults = known, faults
        now = self._clock()
        return {name: Seen(one.heartbeat, now - one.changed_at) for name, one in known.items()}

    def _read(self, replica_id: str, known: dict[str, _Known]) -> None:
        before = known.get(replica_id)
        try:
            found = self._store.get(
                heartbeat_key(self._run_id, replica_id),
                if_none_match=before.etag if before else None,
                max_bytes=MAX_HEARTBEAT_BYTES,
            )
        except ObjectNotFound:
            known.pop(replica_id, None)
            return
        if isinstance(found, NotModified) or (before and found.etag == before.etag):
            return
        heartbeat = decode_heartbeat(found.data, run_id=self._run_id, replica_id=replica_id)
        known[replica_id] = _Known(found.etag, heartbeat, self._clock())

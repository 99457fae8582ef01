"""The wire form of ``GET /bucket_lora/status``: what a replica, or the proxy, says is ready. Pure.

A replica answers with ``ReplicaStatus``. The proxy asks every replica and answers with
``FleetStatus``. With ``?adapter=<name>&wait=<seconds>`` either holds the answer back until that
adapter is ready, refused, or the wait is over, and adds ``adapter`` to it; a client reads the same
field of both. The answer is 200 in all these cases: the state is in the body.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

STATUS_PATH = "/bucket_lora/status"
ADAPTER_PARAM = "adapter"
WAIT_PARAM = "wait"
NEED_PARAM = "need"
"""``any`` (default), ``all`` or a number: on how many replicas the proxy waits for the adapter."""

MAX_WAIT_S = 30.0
"""Longest long-poll a server grants, whatever the client asks: below usual gateway limits."""


def slots_needed(window: int) -> int:
    """Adapter slots (``--max-loras``) a replica needs for a run: its window and the next version.

    The next version is loaded before the oldest one is retired, so that nothing pauses.
    """
    return window + 1


_WIRE = ConfigDict(frozen=True, extra="allow")


class ReadyState(StrEnum):
    """State of one adapter on one replica, or on the fleet."""

    READY = "ready"
    """Requests that name it are served with exactly its bytes."""
    PENDING = "pending"
    """Not ready yet: not published, being fetched, or being loaded."""
    REFUSED = "refused"
    """Will never be ready here; the reason says what to change."""
    RETIRED = "retired"
    """Was ready, or could have been, and fell out of the window."""


class AdapterStatus(BaseModel):
    """Answer about the adapter that was asked for."""

    model_config = _WIRE

    name: str
    state: ReadyState
    reason: str | None = None
    """Why it is refused or still pending, in words that name what to change."""
    ready_on: int = 0
    """On how many replicas it is ready (0 or 1 for a replica)."""
    replicas: int = 1
    """How many replicas were asked."""


class RunStatus(BaseModel):
    """One run as a replica sees it."""

    model_config = _WIRE

    state: str
    latest: int = Field(ge=0)
    """Newest version in the manifest last read."""
    window: int = Field(ge=1)
    ready: list[int] = []
    """Versions ready here, ascending."""
    refused: dict[int, str] = {}
    """Versions refused here, with the reason."""
    error: str | None = None
    """Why the whole run is refused (another base model…), or the last fault of reading it."""


class ReplicaStatus(BaseModel):
    """What one replica says of itself."""

    model_config = _WIRE

    replica_id: str
    base_model: str
    revision: str | None = None
    architecture: str | None = None
    """Fingerprint of the served model's shapes (``base_model.architecture_fingerprint``)."""
    dtype: str
    """Serving dtype, as torch names it without prefix."""
    max_loras: int = Field(ge=1)
    """Adapter slots of an engine."""
    max_lora_rank: int = Field(ge=1)
    vllm_version: str = ""
    ready: list[str] = []
    """Names of all adapters that are ready, of all runs."""
    runs: dict[str, RunStatus] = {}
    error: str | None = None
    """Last fault that concerns no single run (bucket unreachable…)."""
    adapter: AdapterStatus | None = None


class FleetStatus(BaseModel):
    """What the proxy says of the replicas behind it."""

    model_config = _WIRE

    replicas: dict[str, ReplicaStatus | None] = {}
    """By replica URL; ``None`` for one that did not answer."""
    errors: dict[str, str] = {}
    """By replica URL: why it did not answer."""
    adapter: AdapterStatus | None = None

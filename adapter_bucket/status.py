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
VERSIONS_PATH = "/bucket_lora/versions"
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


class ProbeResult(StrEnum):
    """What became of a version's probe on one replica."""

    NONE = "none"
    """Its manifest entry has no probe."""
    PASSED = "passed"
    """Every engine of the replica computes as the trainer does."""
    FAILED = "failed"
    """One does not; the version is refused, with the reason."""


UNREAD = "unread"
"""State of a run whose manifest could not be read or believed yet: ``error`` says why. Its other
fields say nothing then. The other states are those of ``manifest.RunState``."""


class AdapterStatus(BaseModel):
    """Answer about the adapter that was asked for."""

    model_config = _WIRE

    name: str
    state: ReadyState
    reason: str | None = None
    """Why it is refused or still pending, in words that name what to change."""
    ready_on: int = 0
    """On how many replicas it is ready (0 or 1 for a replica)."""
    retried: bool = False
    """Refused for now: it could not be fetched or verified and is still tried. It says nothing
    against the next version."""
    replicas: int = 1
    """How many replicas were asked."""
    probe: ProbeResult | None = None
    """What became of its probe; ``None`` while it was not tried, and in answers about a fleet."""


class VersionStatus(AdapterStatus):
    """One version in the window of a run, in the answer of ``GET /bucket_lora/versions``."""

    run_id: str
    version: int
    step: int
    """Optimizer step of its snapshot."""
    created_at: float
    """Unix time by the writer's clock, seconds."""
    rank: int
    dtype: str
    weights_bytes: int


class VersionList(BaseModel):
    """What a replica says of every version that it knows, by run and ascending."""

    model_config = _WIRE

    replica_id: str
    versions: list[VersionStatus] = []


class RunStatus(BaseModel):
    """One run as a replica sees it."""

    model_config = _WIRE

    state: str
    """A state of ``manifest.RunState``, as the manifest says, or ``UNREAD``."""
    latest: int = Field(ge=0)
    """Newest version in the manifest last read."""
    window: int = Field(ge=1)
    ready: list[int] = []
    """Versions ready here, ascending."""
    refused: dict[int, str] = {}
    """Versions refused here, with the reason."""
    retried: list[int] = []
    """Those of them that could not be fetched or verified, and are still tried, ascending."""
    probes: dict[int, ProbeResult] = {}
    """By version: what became of the probes of ready and of refused versions."""
    refusal: str | None = None
    """Why no version of the run is served here, in words that name what to change: another base
    model, too few slots. Somebody has to act."""
    error: str | None = None
    """Last fault of reading the run; it may pass by itself. What is ready goes on being served."""


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
    quantization: str = ""
    """Quantization of the served base model, ``none`` without one; empty if not known."""
    logprobs_mode: str = ""
    """``--logprobs-mode`` of the server; a trainer that corrects by sampled logprobs wants
    ``processed_logprobs``."""
    plugin_version: str = ""
    in_flight: int = Field(default=0, ge=0)
    """Requests that name an adapter and are being served, by the process that answers."""
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

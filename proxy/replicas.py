"""What the proxy knows of one replica. No I/O here: ``watcher.py`` does it.

A replica is *up* from a status answer until a failure. Everything that was learnt before a failure
is forgotten with it, because the process that answers next may be another, empty one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from adapter_bucket.ready_views import on_replica
from adapter_bucket.status import AdapterStatus, ReadyState, ReplicaStatus
from bucket_lora_proxy.breaker import Breaker
from bucket_lora_proxy.upstream import Origin, Pool

VERDICT_AGE_S = 5.0
"""How long a replica's answer about one adapter is believed, where its plain status says less."""

BLIP_S = 2.0
"""An absence below this was a broken connection, not a restart: no slow start after it."""

MAX_VERDICTS = 256
"""Answers kept per replica; the oldest is dropped."""


class Source(StrEnum):
    """How a replica came to be in the fleet."""

    STATIC = "static"
    BUCKET = "bucket"


@dataclass(frozen=True)
class Model:
    """One entry of a replica's ``/v1/models``."""

    id: str
    parent: str | None
    """Set for an adapter."""


class Replica:
    """State of one replica.

    Args:
        origin: its address.
        slot: its number in the router's index.
        data: connections for generations.
        control: connections for everything else, so that a full data pool cannot hide a replica.
        source: how it came to be in the fleet.
        slow_start_s: how long after it (re)joined it is held back.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        slot: int,
        data: Pool,
        control: Pool,
        source: Source = Source.STATIC,
        slow_start_s: float = 0.0,
    ) -> None:
        self.origin = origin
        self.slot = slot
        self.data = data
        self.control = control
        self.source = source
        self.runs: tuple[str, ...] = ()
        """Runs whose heartbeats name it."""
        self.gone = False
        """It is no member any more."""
        self.slow_start_s = slow_start_s
        self.warm_at = -math.inf
        """When its slow start after a real absence is over; loop time."""
        self._down_since: float | None = None
        self.up = False
        self.reason = "not asked yet"
        """Why it is not up."""
        self.held: str | None = None
        """Why it gets no generations although it is up; set and cleared by whoever holds it."""
        self.draining = False
        """Somebody asked that it gets no new generations; running ones end as usual."""
        self.breaker = Breaker()
        self.status: ReplicaStatus | None = None
        """Its last status; ``None`` if it is down, or has no bucket-lora plugin."""
        self.process = ""
        """Its own name for itself when its base models were last asked for; another one may answer
        at the same address without having been seen to be down."""
        self.base_models: frozenset[str] = frozenset()
        self.ready: frozenset[str] = frozenset()
        """Adapters that a generation may name here."""
        self.cached_tokens: Callable[[], int] = lambda: 0
        """Prompt tokens that the router takes it to hold."""
        self.in_flight = 0
        self.by_model: dict[str, int] = {}
        """The same by model; only those that are not 0."""
        self.outstanding = 0.0
        """Tokens it still has to compute for the generations it was given."""
        self.faults = 0
        """Failures seen so far; an answer to a question asked before the last one is void."""
        self.answers = 0
        """Answers about single adapters so far; an older plain status is void too."""
        self.poke = asyncio.Event()
        """Set to have the watcher look at once."""
        self._verdicts: dict[str, tuple[float, AdapterStatus]] = {}

    @property
    def url(self) -> str:
        return self.origin.url

    @property
    def in_rotation(self) -> bool:
        return self.up and self.held is None and not self.draining

    @property
    def why_not(self) -> str:
        """Why it is not in rotation."""
        if not self.up:
            return self.reason
        return self.held or ("it is being drained" if self.draining else "")

    def begin(self, model: str | None) -> int:
        """It is given a generation. Returns the number of its trial, as ``Breaker.begin``."""
        name = model or ""
        self.in_flight += 1
        self.by_model[name] = self.by_model.get(name, 0) + 1
        return self.breaker.begin()

    def end(self, model: str | None, trial: int) -> None:
        """That generation is over, one way or another."""
        name = model or ""
        self.in_flight -= 1
        left = self.by_model[name] - 1
        if left:
            self.by_model[name] = left
        else:
            del self.by_model[name]
        if trial:
            self.breaker.end(trial)

    def serves(self, model: str | None) -> bool:
        """Whether a generation for this model may be sent here now."""
        return (
            self.up
            and (model is None or model in self.ready or model in self.base_models)
            and self.in_rotation
        )

    def down_for(self, now: float) -> float:
        """For how long it has not been up, in seconds; 0 if it is."""
        if self.up:
            return 0.0
        if self._down_since is None:
            self._down_since = now
        return now - self._down_since

    def warmth(self, now: float) -> float:
        """How far its slow start is, from 0 to 1."""
        left_s = self.warm_at - now
        return 1.0 if left_s <= 0 else max(0.0, 1 - left_s / self.slow_start_s)

    def mark_down(self, reason: str, now: float | None = None) -> bool:
        """Take the replica out of rotation and forget what it had. Returns whether it was up."""
        was_up, self.up = self.up, False
        if self._down_since is None:
            self._down_since = now
        self.reason = reason
        self.faults += 1
        self.status = None
        self.ready = frozenset()
        self._verdicts.clear()
        self.data.drop_idle()
        self.poke.set()
        return was_up

    def mark_up(
        self,
        status: ReplicaStatus | None,
        models: Iterable[Model] | None,
        now: float | None = None,
    ) -> bool:
        """Take in an answer. Returns whether something a waiting request may care for changed.

        Args:
            status: its status, or ``None`` for a server without the plugin.
            models: its model list, or ``None`` to keep what is known of its base models.
            now: loop time; given, a replica that was away starts slowly.
        """
        if now is not None and not self.up:
            away_s = math.inf if self._down_since is None else now - self._down_since
            if away_s > BLIP_S:
                self.warm_at = now + self.slow_start_s
        self._down_since = None
        before = (self.up, self.ready, self.base_models, self.status)
        if models is not None:
            listed = list(models)
            self.base_models = frozenset(m.id for m in listed if m.parent is None)
            if status is None:
                self.ready = frozenset(m.id for m in listed if m.parent is not None)
        if status is not None:
            self.ready = frozenset(status.ready)
        self.status = status
        self.up = True
        self.reason = ""
        return before != (self.up, self.ready, self.base_models, self.status)

    def take_verdict(self, status: ReplicaStatus, now: float) -> None:
        """Take in the answer to a question about one adapter."""
        self.answers += 1
        self.status = status
        self.ready = frozenset(status.ready)
        if status.adapter is None:
            return
        verdict = status.adapter
        if verdict.state is ReadyState.READY:
            self.ready |= {verdict.name}
        self._verdicts.pop(verdict.name, None)
        self._verdicts[verdict.name] = (now, verdict)
        if len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def lacks(self, name: str) -> None:
        """The replica just said that it has no such adapter, whatever its last status said."""
        self.ready -= {name}
        self._verdicts.pop(name, None)
        self.poke.set()

    def gains(self, name: str) -> None:
        """It has just loaded this adapter. Status answers that are on their way are void."""
        self.answers += 1
        self.ready |= {name}

    def loses(self, name: str) -> None:
        """It is about to unload this adapter. Status answers that are on their way are void."""
        self.answers += 1
        self.ready -= {name}

    def view(self, name: str, now: float) -> AdapterStatus:
        """State of one adapter here, as far as it is known."""
        if name in self.ready:
            return AdapterStatus(name=name, state=ReadyState.READY, ready_on=1)
        said = self._verdicts.get(name)
        if said and now - said[0] < VERDICT_AGE_S and said[1].state is not ReadyState.READY:
            return said[1]
        if self.status is None:
            reason = "not in the server's model list (it has no bucket-lora plugin)"
            return AdapterStatus(name=name, state=ReadyState.PENDING, reason=reason)
        view = on_replica(self.status, name)
        if view.state is ReadyState.READY:  # it answered 404 after it said so
            return AdapterStatus(name=name, state=ReadyState.PENDING, reason="being reloaded")
        return view

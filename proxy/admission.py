"""Holds a generation until a replica may serve it, or says why none will."""

from __future__ import annotations

import asyncio

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import AdapterStatus, ReadyState
from bucket_lora_proxy.errors import RETRY_AFTER_S, ApiError, ErrorType
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.watcher import Watcher

GRACE_S = 2.0
"""How long a request that lost its replica waits for any other, where a new one is refused at once;
and how long after a replica left the others alone do not decide that an adapter will never be
served. A replica that only reset one connection is back within a status call."""

MAX_NAMES_SHOWN = 20


class Admission:
    """Answers "who may serve this model?".

    Args:
        fleet: the replicas.
        watcher: asked to look for an adapter while a request waits for it.
        metrics: counts the requests that wait.
        wait_s: how long a request may wait.
    """

    def __init__(self, fleet: Fleet, watcher: Watcher, metrics: Metrics, *, wait_s: float) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._watcher = watcher
        self._wait_s = wait_s

    async def candidates(self, model: str | None, *, retry: bool = False) -> list[Replica]:
        """Replicas that serve exactly this model now; waits for an adapter that may come.

        Args:
            model: the name in the request; ``None`` is whatever base model is served.
            retry: the request has already lost a replica.

        Raises:
            ApiError: 503 ``no_replica`` at once if none is up; 503 ``adapter_not_ready`` after
                the wait; 410 ``adapter_retired``, 409 ``adapter_refused`` and 404
                ``model_not_found`` at once. Never is another model offered instead.
        """
        found = self._fleet.serving(model)
        if found:
            return found
        if retry and not self._fleet.up():
            await self._fleet.changed_until(lambda: bool(self._fleet.up()), GRACE_S)
            if found := self._fleet.serving(model):
                return found
        name = self._hoped_for(model)
        self._metrics.waited.add()

        def settled() -> bool:
            self._hoped_for(model)
            return bool(self._fleet.serving(model))

        begun = asyncio.get_running_loop().time()
        async with self._watcher.awaiting(name):
            try:
                if not await self._fleet.changed_until(settled, self._wait_s):
                    raise self._not_ready(name)
            finally:
                waited_s = asyncio.get_running_loop().time() - begun
                self._metrics.phases.observe(waited_s, "adapter_wait")
        return self._fleet.serving(model)

    def _hoped_for(self, model: str | None) -> str:
        """The adapter's name, if waiting for it makes sense."""
        if not self._fleet.up():
            raise no_replica(self._fleet)
        if model is None or parse_adapter_name(model) is None:
            raise self._unknown(str(model))
        if self._fleet.has_just_lost_one(GRACE_S):
            return model
        view = self._fleet.adapter(model)
        if view.state is ReadyState.RETIRED:
            raise self._gone(view, 410, ErrorType.ADAPTER_RETIRED, "is no longer served")
        if view.state is ReadyState.REFUSED:
            raise self._gone(view, 409, ErrorType.ADAPTER_REFUSED, "is refused by every replica")
        return model

    def _unknown(self, model: str) -> ApiError:
        served = sorted({name for r in self._fleet.up() for name in r.base_models | r.ready})
        return ApiError(
            404,
            ErrorType.MODEL_NOT_FOUND,
            f"model {model[:200]!r} is not served; served are: {_listing(served)}",
            details={"served": served},
        )

    def _gone(self, view: AdapterStatus, status: int, type: ErrorType, what: str) -> ApiError:
        served = self._versions_of(view.name)
        return ApiError(
            status,
            type,
            f"adapter {view.name!r} {what} ({view.reason}); versions of this run that are "
            f"served: {_listing(served)}",
            details={"adapter": view.name, "served": served},
        )

    def _not_ready(self, name: str) -> ApiError:
        view = self._fleet.adapter(name)
        served = self._versions_of(name)
        return ApiError(
            503,
            ErrorType.ADAPTER_NOT_READY,
            f"adapter {name!r} is not ready on any of {view.replicas} replicas after "
            f"{self._wait_s:g} s ({view.reason}); versions of this run that are served: "
            f"{_listing(served)}",
            retry_after_s=RETRY_AFTER_S,
            details={"adapter": name, "served": served},
        )

    def _versions_of(self, name: str) -> list[str]:
        parsed = parse_adapter_name(name)
        ready = {adapter for replica in self._fleet.up() for adapter in replica.ready}
        named = [(parse_adapter_name(adapter), adapter) for adapter in ready]
        same = [
            (key[1], adapter) for key, adapter in named if key and parsed and key[0] == parsed[0]
        ]
        return [adapter for _, adapter in sorted(same)]


def no_replica(fleet: Fleet) -> ApiError:
    """The answer when nothing is in rotation: says why, and of every replica too."""
    reasons = {r.url: r.why_not for r in fleet.replicas if not r.in_rotation}
    shown = [f"{url}: {reason}" for url, reason in list(reasons.items())[:3]]
    if fleet.note:
        shown.append(fleet.note)
    count = len(fleet.replicas)
    subject = f"none of {count} replicas is in rotation" if count else "there is no replica"
    return ApiError(
        503,
        ErrorType.NO_REPLICA,
        f"{subject} ({'; '.join(shown)})",
        retry_after_s=RETRY_AFTER_S,
        details={"replicas": reasons},
    )


def _listing(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[-MAX_NAMES_SHOWN:]) + more

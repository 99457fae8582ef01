"""The answers that the proxy gives as one server: status, health, models, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import math

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from adapter_bucket.errors import ConfigError
from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.status import (
    ADAPTER_PARAM,
    MAX_WAIT_S,
    NEED_PARAM,
    WAIT_PARAM,
    FleetStatus,
    ReadyState,
)
from bucket_lora_proxy.admission import no_replica
from bucket_lora_proxy.broadcast import Broadcast, Reply
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.disconnect import CancelOnDisconnect
from bucket_lora_proxy.errors import (
    RETRY_AFTER_S,
    ApiError,
    ErrorType,
    Headers,
    UpstreamError,
)
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import CONTENT_TYPE, Metrics
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.request_body import receive_body
from bucket_lora_proxy.upstream import Origin
from bucket_lora_proxy.watcher import MAX_CONTROL_BYTES, Watcher

log = logging.getLogger("bucket_lora_proxy")

NO_PLUGIN = "the server has no bucket-lora plugin; its adapters are taken from /v1/models"

MAX_CALL_BYTES = 64 * 1024
CALL_BODY_S = 10.0
"""Limits of the body of a state-changing call, which is a name and a path."""


class Endpoints:
    """One method per route."""

    def __init__(
        self,
        config: ProxyConfig,
        fleet: Fleet,
        watcher: Watcher,
        broadcast: Broadcast,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._broadcast = broadcast
        self._fleet = fleet
        self._watcher = watcher
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """200 once ``min_healthy`` replicas are in rotation, else 503; the body counts both."""
        total, up = len(self._fleet.replicas), len(self._fleet.up())
        reasons = {r.url: r.why_not for r in self._fleet.replicas if not r.in_rotation}
        document: dict[str, object] = {
            "status": "ok" if up == total > 0 else "degraded" if up else "unhealthy",
            "message": f"{total - up}/{total} servers unhealthy",
            "replicas": total,
            "healthy": up,
            "unhealthy": reasons,
        }
        if self._fleet.note:
            document["membership"] = self._fleet.note
        if up >= self._config.min_healthy:
            return JSONResponse(document)
        return JSONResponse(document, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def status(self, request: Request) -> Response:
        """The fleet's status; with ``adapter``, once that adapter's fate is known or time is up."""
        query = request.query_params
        name = query.get(ADAPTER_PARAM)
        policy = _policy(query.get(NEED_PARAM, "any"))
        wait_s = _wait_s(query.get(WAIT_PARAM, "0"))
        if name is not None and wait_s > 0:
            async with CancelOnDisconnect(request.receive), self._watcher.awaiting(name):
                await self._fleet.changed_until(lambda: self._settled(name, policy), wait_s)
        replicas, errors = {}, {}
        for replica in self._fleet.replicas:
            replicas[replica.url] = replica.status
            if replica.status is None:
                errors[replica.url] = NO_PLUGIN if replica.up else replica.reason
        adapter = self._fleet.adapter(name, policy) if name is not None else None
        document = FleetStatus(replicas=replicas, errors=errors, adapter=adapter)
        return Response(document.model_dump_json(), media_type="application/json")

    def _settled(self, name: str, policy: ReadyPolicy) -> bool:
        return self._fleet.adapter(name, policy).state is not ReadyState.PENDING

    async def models(self, request: Request) -> Response:
        """Models that every replica in rotation lists, with the smallest ``max_model_len``."""
        replicas = self._fleet.up()
        answers = await asyncio.gather(*(self._model_cards(replica) for replica in replicas))
        lists = [cards for cards in answers if cards is not None]
        if not lists:
            raise no_replica(self._fleet)
        cards = common_models(lists)
        if not any(card.get("parent") is None for card in cards):
            raise ApiError(
                503,
                ErrorType.MODELS_DIFFER,
                f"{len(lists)} replicas have no base model in common; start all of them with the "
                "same model and --served-model-name",
            )
        return JSONResponse({"object": "list", "data": cards})

    async def _model_cards(self, replica: Replica) -> list[dict[str, object]] | None:
        try:
            status, body = await self._ask(replica, b"/v1/models")
            cards = json.loads(body)["data"] if status == 200 else None
        except (UpstreamError, ValueError, KeyError, TypeError):
            replica.poke.set()
            return None
        return [card for card in cards if isinstance(card, dict)] if cards else None

    async def load_adapter(self, request: Request) -> Response:
        """Load on all replicas or on none."""
        return _reply(await self._broadcast.load(await _small_body(request)))

    async def unload_adapter(self, request: Request) -> Response:
        """Unload wherever it is loaded."""
        return _reply(await self._broadcast.unload(await _small_body(request)))

    async def pause(self, request: Request) -> Response:
        """Pause all replicas, under a lease."""
        return _reply(await self._broadcast.pause(request.scope["query_string"]))

    async def resume(self, request: Request) -> Response:
        """Resume all replicas."""
        return _reply(await self._broadcast.resume())

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Reset it on all replicas."""
        return _reply(await self._broadcast.reset_prefix_cache(request.scope["query_string"]))

    async def drain(self, request: Request) -> Response:
        """Give a replica no new generations, until ``undrain``. Tells what it still works on."""
        return self._set_draining(request, draining=True)

    async def undrain(self, request: Request) -> Response:
        """Put a drained replica back."""
        return self._set_draining(request, draining=False)

    def _set_draining(self, request: Request, *, draining: bool) -> Response:
        given = request.query_params.get("replica", "")
        try:
            url = Origin.parse(given).url
        except ConfigError:
            url = given  # no address, so it is not a known one
        replica = next((one for one in self._fleet.replicas if one.url == url), None)
        if replica is None:
            known = ", ".join(one.url for one in self._fleet.replicas) or "none"
            raise ApiError(
                400,
                ErrorType.BAD_REQUEST,
                f"replica {url[:200]!r} is not known; known are: {known}",
            )
        replica.draining = draining
        log.info("replica %s is %s", url, "being drained" if draining else "no longer drained")
        self._fleet.notify()
        return JSONResponse({"replica": url, "draining": draining, "in_flight": replica.in_flight})

    async def metrics(self, request: Request) -> Response:
        """The proxy's own metrics."""
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE.decode()})

    async def any_replica(self, request: Request) -> Response:
        """Pass a read-only question on to the first replica in rotation."""
        for replica in self._fleet.up():
            target = request.url.path.encode()
            if request.scope["query_string"]:
                target += b"?" + request.scope["query_string"]
            try:
                status, body = await self._ask(replica, target)
            except UpstreamError:
                replica.poke.set()
                continue
            return Response(body, status, media_type="application/json")
        raise no_replica(self._fleet)

    async def _ask(self, replica: Replica, target: bytes) -> tuple[int, bytes]:
        limit_s = self._config.control_timeout_s
        return await replica.control.fetch(
            b"GET", target, timeout_s=limit_s, max_bytes=MAX_CONTROL_BYTES
        )


def common_models(lists: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    """Cards whose id stands in every list, in the order of the first. Pure."""
    common = []
    for card in lists[0]:
        same = [[c for c in cards if c.get("id") == card.get("id")] for cards in lists]
        if not all(same):
            continue
        lengths = [c["max_model_len"] for found in same for c in found[:1] if "max_model_len" in c]
        numbers = [length for length in lengths if isinstance(length, int)]
        common.append({**card, "max_model_len": min(numbers)} if numbers else card)
    return common


def _reply(reply: Reply) -> Response:
    kind = "application/json" if reply.body.startswith(b"{") else "text/plain"
    return Response(reply.body, reply.status, media_type=kind)


async def _small_body(request: Request) -> bytes:
    headers: Headers = request.scope["headers"]
    return await receive_body(
        request.receive, headers, max_bytes=MAX_CALL_BYTES, timeout_s=CALL_BODY_S
    )


def _policy(need: str) -> ReadyPolicy:
    try:
        return ReadyPolicy.from_need(need)
    except ConfigError as error:
        raise ApiError(400, ErrorType.BAD_REQUEST, str(error)) from None


def _wait_s(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ApiError(
            400, ErrorType.BAD_REQUEST, f"{WAIT_PARAM} is {value[:50]!r}; give seconds from 0"
        )
    return min(seconds, MAX_WAIT_S)

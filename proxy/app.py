"""Puts the parts together: routes, authentication, lifespan. Nothing else."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter_bucket.status import STATUS_PATH
from bucket_lora_proxy.admission import Admission
from bucket_lora_proxy.answers import send_error
from bucket_lora_proxy.auth import Doorkeeper
from bucket_lora_proxy.broadcast import Broadcast
from bucket_lora_proxy.certificates import replica_context
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.endpoints import Endpoints
from bucket_lora_proxy.errors import ApiError, ClientGone, ErrorType
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.forward import GENERATION_PATHS, Forwarder
from bucket_lora_proxy.membership.members import Membership
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.outbox import Outbox
from bucket_lora_proxy.recent_errors import RecentErrors
from bucket_lora_proxy.replicas import Replica, Source
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.status_page.endpoint import StatusPage
from bucket_lora_proxy.status_page.history import History
from bucket_lora_proxy.upstream import Origin, Pool
from bucket_lora_proxy.watcher import Watcher

log = logging.getLogger("bucket_lora_proxy")

CONTROL_CONNECTIONS = 64
"""Connections to one replica for everything but generations; long-polls hold one each."""


@dataclass(frozen=True)
class Deps:
    """What the app is made of."""

    config: ProxyConfig
    fleet: Fleet
    router: Router
    watcher: Watcher
    membership: Membership
    broadcast: Broadcast
    metrics: Metrics
    errors: RecentErrors
    history: History
    status_page: StatusPage
    doorkeeper: Doorkeeper
    forwarder: Forwarder


def build_deps(config: ProxyConfig) -> Deps:
    """Make everything that a configuration asks for; starts nothing."""
    tls = replica_context(config)
    outbox = Outbox()

    def make(origin: Origin, slot: int, source: Source, token: str | None) -> Replica:
        data, control = (
            Pool(
                origin,
                limit=limit,
                keep_alive_s=config.keep_alive_s,
                connect_timeout_s=config.connect_timeout_s,
                token=token,
                tls=tls,
                outbox=outbox,
            )
            for limit in (config.max_connections, CONTROL_CONNECTIONS)
        )
        return Replica(
            origin,
            slot=slot,
            data=data,
            control=control,
            source=source,
            slow_start_s=config.slow_start_s,
        )

    fleet, router = Fleet(), Router(0)
    metrics = Metrics(fleet)
    errors = RecentErrors()
    watcher = Watcher(fleet, router.index, config, errors)
    membership = Membership(config, fleet, router, watcher, metrics, make)
    broadcast = Broadcast(config, fleet, router, watcher)
    history = History(metrics)
    doorkeeper = Doorkeeper(config.tokens, serves_tls=config.serves_tls)
    forwarder = Forwarder(
        config,
        doorkeeper=doorkeeper,
        fleet=fleet,
        admission=Admission(fleet, watcher, metrics, wait_s=config.adapter_wait_s),
        router=router,
        watcher=watcher,
        metrics=metrics,
        errors=errors,
        outbox=outbox,
    )
    return Deps(
        config=config,
        fleet=fleet,
        router=router,
        watcher=watcher,
        membership=membership,
        broadcast=broadcast,
        metrics=metrics,
        errors=errors,
        history=history,
        status_page=StatusPage(fleet, metrics, history, errors),
        doorkeeper=doorkeeper,
        forwarder=forwarder,
    )


def create_app(deps: Deps) -> ASGIApp:
    """All but the generations, which ``ClientConnection`` takes out before."""
    config = deps.config
    endpoints = Endpoints(config, deps.fleet, deps.watcher, deps.broadcast, deps.metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with deps.watcher.run(), deps.membership.run(), deps.history.run():
            try:
                yield
            finally:
                deps.forwarder.stop()
                await deps.broadcast.close()

    routes = {
        "/": ("GET", deps.status_page.show),
        "/health": ("GET", endpoints.health),
        STATUS_PATH: ("GET", endpoints.status),
        "/v1/models": ("GET", endpoints.models),
        "/metrics": ("GET", endpoints.metrics),
        "/server_info": ("GET", endpoints.any_replica),
        "/get_world_size": ("GET", endpoints.any_replica),
    }
    routes |= {
        "/proxy/drain": ("POST", endpoints.drain),
        "/proxy/undrain": ("POST", endpoints.undrain),
    }
    if config.allow_broadcast:
        routes |= {
            "/v1/load_lora_adapter": ("POST", endpoints.load_adapter),
            "/v1/unload_lora_adapter": ("POST", endpoints.unload_adapter),
            "/pause": ("POST", endpoints.pause),
            "/resume": ("POST", endpoints.resume),
            "/reset_prefix_cache": ("POST", endpoints.reset_prefix_cache),
        }
    control = Starlette(
        routes=[Route(path, run, methods=[method]) for path, (method, run) in routes.items()],
        lifespan=lifespan,
        exception_handlers={ApiError: _api_error(deps.errors), ClientGone: _client_gone},
    )
    return Gate(
        deps.doorkeeper,
        control=control,
        control_methods={path: method for path, (method, _) in routes.items()},
        errors=deps.errors,
    )


def _api_error(errors: RecentErrors) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        errors.remember(error)
        headers = {name.decode(): value.decode() for name, value in error.headers()}
        return Response(error.body(), error.status, headers)

    return answer


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


class Gate:
    """First in line: authenticates, and lets through to the Starlette app only what is allowed."""

    def __init__(
        self,
        doorkeeper: Doorkeeper,
        *,
        control: ASGIApp,
        control_methods: dict[str, str],
        errors: RecentErrors,
    ) -> None:
        self._doorkeeper = doorkeeper
        self._control = control
        self._control_methods = control_methods
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        try:
            await self._serve(scope, receive, send)
        except ApiError as error:
            self._errors.remember(error)
            await send_error(send, error)
        except ClientGone:
            pass
        except Exception:
            # Only reached before an answer has begun or by a fault of this program; the server
            # closes the connection if one has begun.
            log.exception("serving %s failed", scope["path"])
            raise

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._doorkeeper.check(scope["headers"])
        path, method = scope["path"], scope["method"]
        if method != "GET":
            self._doorkeeper.refuse_other_sites(scope["headers"])
        if path in GENERATION_PATHS:  # a POST does not come here
            raise _wrong_method(method, path, "POST")
        if allowed := self._control_methods.get(path):
            if method != allowed and not (method == "HEAD" and allowed == "GET"):
                raise _wrong_method(method, path, allowed)
            await self._control(scope, receive, send)
        else:
            raise ApiError(
                403, ErrorType.ROUTE_FORBIDDEN, f"{path[:200]!r} is not served by this proxy"
            )


def _wrong_method(method: str, path: str, allowed: str) -> ApiError:
    return ApiError(405, ErrorType.METHOD_NOT_ALLOWED, f"{method} {path}: use {allowed}")

"""The endpoint plugin: starts the watcher in each API server process, answers the status route."""

from __future__ import annotations

import hmac
import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from adapter_bucket.status import (
    ADAPTER_PARAM,
    MAX_WAIT_S,
    STATUS_PATH,
    VERSIONS_PATH,
    WAIT_PARAM,
)
from vllm_bucket_lora.config import PLUGIN_NAME
from vllm_bucket_lora.service import Service
from vllm_bucket_lora.start import start_service

logger = logging.getLogger(__name__)


class BucketLoraEndpoints:
    """Entry point of ``vllm.endpoint_plugins``; vLLM makes one per API server process."""

    name = PLUGIN_NAME
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._service: Service | None = None
        self._keys: list[str] = []

    def attach_router(self, app: Any) -> None:
        """Add the routes. Called before ``init_state``."""
        app.add_route(STATUS_PATH, self.status, methods=["GET"])
        app.add_route(VERSIONS_PATH, self.versions, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start following the bucket, unless the plugin was not asked for."""
        if PLUGIN_NAME not in getattr(args, "plugin", ()):
            logger.info("%s is installed but off; --plugin %s starts it", PLUGIN_NAME, PLUGIN_NAME)
            return
        self._keys = _api_keys(args)
        self._service = await start_service(engine_client, state.openai_serving_models, args)

    async def status(self, request: Request) -> Response:
        """``GET /bucket_lora/status``, see ``adapter_bucket.status``."""
        service = self._service_for(request)
        if isinstance(service, Response):
            return service
        try:
            wait_s = min(MAX_WAIT_S, max(0.0, float(request.query_params.get(WAIT_PARAM, "0"))))
        except ValueError:
            return JSONResponse({"error": f"{WAIT_PARAM} is not a number"}, status_code=400)
        answer = await service.answer(request.query_params.get(ADAPTER_PARAM), wait_s)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def versions(self, request: Request) -> Response:
        """``GET /bucket_lora/versions``: each version in a window, with its state and size."""
        service = self._service_for(request)
        if isinstance(service, Response):
            return service
        return Response(service.versions().model_dump_json(), media_type="application/json")

    def _service_for(self, request: Request) -> Service | Response:
        """The service, or why this request gets no answer of it."""
        if not _authorised(request, self._keys):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        if self._service is None:
            return JSONResponse({"error": f"start with --plugin {PLUGIN_NAME}"}, status_code=404)
        return self._service


def _api_keys(args: Namespace) -> list[str]:
    """The server's keys. vLLM's middleware guards other paths only, so the route asks itself."""
    given: Sequence[str | None] = args.api_key or [os.environ.get("VLLM_API_KEY")]
    return [key for key in given if key]


def _authorised(request: Request, keys: Sequence[str]) -> bool:
    if not keys:
        return True
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    matches = [hmac.compare_digest(token.encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)

"""``GET /``: the status page."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.recent_errors import RecentErrors
from bucket_lora_proxy.status_page.assets import HEADERS
from bucket_lora_proxy.status_page.history import History
from bucket_lora_proxy.status_page.page import render
from bucket_lora_proxy.status_page.view import view_of


class StatusPage:
    """Renders the page anew for every request: it costs a few milliseconds."""

    def __init__(
        self, fleet: Fleet, metrics: Metrics, history: History, errors: RecentErrors
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._history = history
        self._errors = errors
        self.shown = 0
        """How often it was asked for."""

    async def show(self, request: Request) -> Response:
        """Answer with the page."""
        self.shown += 1
        now = asyncio.get_running_loop().time()
        view = view_of(self._fleet, self._metrics, self._history, self._errors, now)
        return HTMLResponse(render(view, datetime.now(UTC)), headers=HEADERS)

"""Background tasks that keep the fleet's state true: one per replica, and one per adapter awaited.

The plain watch asks every replica for its health and status every ``poll_s``. While somebody waits
for an adapter, each replica is asked about that one with a long-poll too, so that its readiness
is known one round trip after it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from pydantic import ValidationError

from adapter_bucket.json_logs import about
from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import (
    ADAPTER_PARAM,
    STATUS_PATH,
    WAIT_PARAM,
    ReadyState,
    ReplicaStatus,
)
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.errors import ProtocolFault, UpstreamError
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.prefix import BLOCK_TOKENS
from bucket_lora_proxy.prefix_index import PrefixIndex
from bucket_lora_proxy.recent_errors import RecentErrors
from bucket_lora_proxy.replicas import Model, Replica

log = logging.getLogger("bucket_lora_proxy")

MAX_CONTROL_BYTES = 16 * 1024 * 1024
"""Largest status answer or model list."""

LONG_POLL_S = 10.0
"""Length of one long-poll about an adapter; repeated while somebody waits."""

LONG_POLL_PAUSE_S = 0.1
"""Pause after a long-poll that brought nothing, so that a server that does not wait is not
flooded."""

MAX_AWAITED = 32
"""Adapters asked about with long-polls at the same time; others are seen by the plain watch."""


_CACHE_INFO = "vllm:cache_config_info{"


class Watcher:
    """Owns the tasks. ``run`` is a context manager around the life of the proxy."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, config: ProxyConfig, errors: RecentErrors
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._config = config
        self._errors = errors
        self._interest: dict[str, int] = {}
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._asking: dict[str, dict[Replica, asyncio.Task[None]]] = {}
        self._runs_told: set[str] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Watch all replicas until the block is left."""
        for replica in self._fleet.replicas:
            self.watch(replica)
        try:
            yield
        finally:
            tasks = [*self._watching.values()]
            tasks += [task for asking in self._asking.values() for task in asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for replica in self._fleet.replicas:
                replica.data.close()
                replica.control.close()

    def watch(self, replica: Replica) -> None:
        """Start to watch a replica that joins."""
        self._watching[replica] = asyncio.create_task(self._watch(replica))
        for name, asking in self._asking.items():
            asking[replica] = asyncio.create_task(self._ask(replica, name))

    def forget(self, replica: Replica, reason: str) -> None:
        """Stop to watch a replica that leaves; what it was still asked fails and goes elsewhere."""
        replica.gone = True
        replica.mark_down(reason)
        self._watching.pop(replica).cancel()
        for asking in self._asking.values():
            if (task := asking.pop(replica, None)) is not None:
                task.cancel()
        replica.data.close()
        replica.control.close()

    @asynccontextmanager
    async def awaiting(self, name: str) -> AsyncIterator[None]:
        """While the block runs, every replica is asked about this adapter."""
        self._interest[name] = self._interest.get(name, 0) + 1
        if name not in self._asking and len(self._asking) < MAX_AWAITED:
            self._asking[name] = {
                replica: asyncio.create_task(self._ask(replica, name))
                for replica in self._fleet.replicas
            }
        try:
            yield
        finally:
            self._interest[name] -= 1
            if self._interest[name] == 0:
                del self._interest[name]
                for task in self._asking.pop(name, {}).values():
                    task.cancel()

    def awaited(self) -> list[str]:
        """Adapters that somebody waits for."""
        return list(self._interest)

    def failed(self, replica: Replica, reason: str) -> None:
        """Take a replica out of rotation because it failed somebody."""
        if replica.gone:  # its slot may be another's by now
            return
        self._index.drop_slot(replica.slot)
        if replica.mark_down(reason, asyncio.get_running_loop().time()):
            extra = about(replica=replica.url)
            log.warning("replica %s left the rotation: %s", replica.url, reason, extra=extra)
            self._errors.add(f"{replica.url} left the rotation", reason)
        self._fleet.notify()

    # --- plain watch ---

    async def _watch(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        last_good = loop.time()
        while True:
            replica.poke.clear()
            faults = replica.faults
            try:
                await self._look(replica, faults)
                last_good = loop.time()
            except Exception as error:
                if not isinstance(error, UpstreamError | ValueError):  # a fault of this program
                    log.exception("watching replica %s failed", replica.url)
                self.failed(replica, _first_line(error))
                replica.poke.clear()
                if loop.time() - last_good > self._config.unresponsive_s:
                    replica.data.fail_active("the replica does not answer its status calls")
            try:
                async with asyncio.timeout(self._config.poll_s):
                    await replica.poke.wait()
            except TimeoutError:
                pass

    async def _look(self, replica: Replica, faults: int) -> None:
        code, _ = await self._get(replica, "/health")
        if code != 200:
            raise ProtocolFault(f"{replica.url}: /health answered {code}")
        answers = replica.answers
        code, body = await self._get(replica, STATUS_PATH)
        if code not in (200, 404):
            raise ProtocolFault(f"{replica.url}: {STATUS_PATH} answered {code}")
        status = ReplicaStatus.model_validate_json(body) if code == 200 else None
        models: list[Model] | None = None
        process = status.replica_id if status is not None else ""
        known = replica.up and process == replica.process and replica.base_models
        if status is None or not known:
            code, body = await self._get(replica, "/v1/models")
            if code != 200:
                raise ProtocolFault(f"{replica.url}: /v1/models answered {code}")
            models = parse_models(body)
        if replica.faults != faults or replica.answers != answers:
            return  # something newer is known; ask again before this is believed
        came_back = not replica.up
        if process != replica.process:
            self._index.drop_slot(replica.slot)  # another process answers: its cache is empty
            replica.process = process
        changed = replica.mark_up(status, models, asyncio.get_running_loop().time())
        if came_back:
            kind = "" if status else " (no bucket-lora plugin: adapters from /v1/models)"
            log.info(
                "replica %s joined the rotation, %d adapters ready%s",
                replica.url,
                len(replica.ready),
                kind,
                extra=about(replica=replica.url),
            )
            await self._learn_cache(replica)
        if changed:
            self._tell_runs(replica)
            self._forget_retired()
            self._fleet.notify()

    def _tell_runs(self, replica: Replica) -> None:
        """Put a run into the log when it is seen first, so that it can be found there."""
        known = set(replica.status.runs) if replica.status else set()
        for run_id in sorted(known - self._runs_told):
            log.info("run %s is served", run_id, extra=about(run_id, replica=replica.url))
        self._runs_told |= known

    async def _learn_cache(self, replica: Replica) -> None:
        """Take the size of its prefix cache and of a block from its metrics, if it tells them."""
        page = ""
        with contextlib.suppress(UpstreamError):
            code, body = await self._get(replica, "/metrics")
            page = body.decode(errors="replace") if code == 200 else ""
        self._index.set_capacity(replica.slot, cache_blocks(page))
        self._index.set_block_tokens(replica.slot, block_tokens(page))

    def _forget_retired(self) -> None:
        """Drop the blocks of adapters that no replica in rotation serves any more."""
        served = {name for replica in self._fleet.up() for name in replica.ready}
        for name in self._index.names() - served:
            if parse_adapter_name(name) is not None and not self._fleet.serving(name):
                self._index.drop_name(name)

    async def _get(
        self, replica: Replica, target: str, *, extra_s: float = 0.0
    ) -> tuple[int, bytes]:
        limit_s = self._config.control_timeout_s + extra_s
        return await replica.control.fetch(
            b"GET", target.encode(), timeout_s=limit_s, max_bytes=MAX_CONTROL_BYTES
        )

    # --- long-polls about one adapter ---

    async def _ask(self, replica: Replica, name: str) -> None:
        loop = asyncio.get_running_loop()
        query = f"{ADAPTER_PARAM}={quote(name, safe='')}&{WAIT_PARAM}={LONG_POLL_S:g}"
        while True:
            if not replica.up:
                await self._fleet.changed(1.0)
                continue
            if replica.status is None:
                replica.poke.set()  # a stock server: its model list is all there is
                await asyncio.sleep(LONG_POLL_PAUSE_S)
                continue
            faults = replica.faults
            try:
                code, body = await self._get(replica, f"{STATUS_PATH}?{query}", extra_s=LONG_POLL_S)
                status = ReplicaStatus.model_validate_json(body) if code == 200 else None
            except (UpstreamError, ValidationError):
                status = None
                replica.poke.set()  # the plain watch finds out what is wrong
            if status is not None and replica.up and replica.faults == faults:
                replica.take_verdict(status, loop.time())
                self._fleet.notify()
                if replica.view(name, loop.time()).state is not ReadyState.PENDING:
                    await self._fleet.changed(1.0)
            await asyncio.sleep(LONG_POLL_PAUSE_S)


def parse_models(body: bytes) -> list[Model]:
    """Read a ``/v1/models`` answer.

    Raises:
        ValueError: it is not one.
    """
    document = json.loads(body)
    try:
        return [Model(id=str(card["id"]), parent=card.get("parent")) for card in document["data"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"/v1/models answered something else: {error!r}") from error


def cache_blocks(page: str) -> int | None:
    """Size of a vLLM prefix cache in blocks of 16 tokens, from its metrics page."""
    found = _cache_info(page)
    if len(found) < 2:
        return None
    return found["block_size"] * found["num_gpu_blocks"] // BLOCK_TOKENS or None


def block_tokens(page: str) -> int | None:
    """Tokens in a block of a vLLM prefix cache, from its metrics page."""
    return _cache_info(page).get("block_size")


def _cache_info(page: str) -> dict[str, int]:
    line = next((line for line in page.splitlines() if line.startswith(_CACHE_INFO)), "")
    return {
        name: int(number)
        for name, number in re.findall(r'\b(block_size|num_gpu_blocks)="(\d{1,12})"', line)
    }


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]

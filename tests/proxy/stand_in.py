"""A stand-in for a vLLM replica, over a real socket.

A real vLLM cannot be told to reset a connection inside a body, to answer garbage, or to become
ready at a given moment, so faults need a server that does as it is told. It speaks just enough
HTTP/1.1 to be driven, answers ``/health``, ``/v1/models`` and ``/bucket_lora/status`` as a replica
with the plugin does (long-poll included), and records every generation it is sent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import AdapterStatus, ReadyState, ReplicaStatus, RunStatus
from tests.proxy.wire import Received, answer, answer_json, read_request, unless_closed

PUSHED = {
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
}

Behaviour = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class StandIn:
    """One replica. Change its fields while it runs."""

    base_model: str = "base"
    plugin: bool = True
    healthy: bool = True
    frozen: bool = False
    """Answers nothing any more, as a stopped process does: connections stay open."""
    ready: set[str] = field(default_factory=set)
    retired: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    max_model_len: int = 256
    token: str | None = None
    behaviour: Behaviour | None = None
    """What a generation gets; default: a small JSON answer that names this replica."""
    mounted: set[str] | None = None
    """Adapter paths this replica can see; ``None``: all."""
    paused: bool = False
    push_fails: dict[str, int] = field(default_factory=dict)
    """Status by path, for calls of stock TRL that fail."""
    loses_answers: bool = False
    """Loads what it is told to, and dies before it says so."""
    pushed: list[Received] = field(default_factory=list)
    generations: list[Received] = field(default_factory=list)
    cancelled: int = 0
    """Generations whose connection was closed by the peer before they were answered."""
    metrics_page: str = ""
    """What ``/metrics`` answers; 404 if empty."""
    replica_id: str = ""
    unauthorised: int = 0
    long_polls: int = 0
    connections: int = 0
    port: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Go away as a killed process does: the port closes and connections are reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def make_ready(self, name: str) -> None:
        self.ready.add(name)
        self._changed.set()

    def names(self) -> list[object]:
        """The ``model`` field of every generation received."""
        return [received.json().get("model") for received in self.generations]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        number = self.connections
        try:
            while (received := await read_request(reader, number)) is not None:
                await self._answer(received, reader, writer)
                if writer.transport.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = urlsplit(received.target).path
        if self.frozen:
            await asyncio.sleep(3600)
        if self.token and received.header("authorization") != f"Bearer {self.token}":
            self.unauthorised += 1
            await answer_json(writer, {"error": "Unauthorized"}, status=401)
        elif path == "/health":
            await answer(writer, b"", status=200 if self.healthy else 503)
        elif path == "/bucket_lora/status" and self.plugin:
            await self._status(received, reader, writer)
        elif path == "/metrics" and self.metrics_page:
            await answer(writer, self.metrics_page.encode(), content_type="text/plain")
        elif path == "/v1/models":
            await answer_json(writer, {"object": "list", "data": self._cards()})
        elif received.method == "POST" and path in PUSHED:
            self.pushed.append(received)
            await self._push(path, received, writer)
        elif received.method == "POST":
            self.generations.append(received)
            await self._generate(received, reader, writer)
        else:
            await answer(writer, b'{"detail":"Not Found"}', status=404)

    async def _status(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        query = parse_qs(urlsplit(received.target).query)
        name = query.get("adapter", [None])[0]
        if name is not None:
            self.long_polls += 1
            wait_s = float(query.get("wait", ["0"])[0])
            await unless_closed(reader, self._settled(name, wait_s))
        status = self._own_status(name)
        await answer(writer, status.model_dump_json().encode())

    async def _settled(self, name: str, wait_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + wait_s
        while self._state(name).state is ReadyState.PENDING:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _state(self, name: str) -> AdapterStatus:
        if name in self.ready:
            return AdapterStatus(name=name, state=ReadyState.READY, ready_on=1)
        if name in self.refused:
            return AdapterStatus(name=name, state=ReadyState.REFUSED, reason=self.refused[name])
        if name in self.retired:
            return AdapterStatus(name=name, state=ReadyState.RETIRED)
        return AdapterStatus(name=name, state=ReadyState.PENDING, reason="not in the manifest yet")

    def _own_status(self, name: str | None) -> ReplicaStatus:
        runs: dict[str, list[int]] = {}
        for adapter in self.ready:
            parsed = parse_adapter_name(adapter)
            assert parsed is not None
            runs.setdefault(parsed[0], []).append(parsed[1])
        return ReplicaStatus(
            replica_id=self.replica_id or f"replica-{self.port}",
            base_model=self.base_model,
            dtype="float32",
            max_loras=4,
            max_lora_rank=8,
            ready=sorted(self.ready),
            runs={
                run: RunStatus(state="running", latest=max(versions), window=4, ready=versions)
                for run, versions in runs.items()
            },
            adapter=self._state(name) if name is not None else None,
        )

    def _cards(self) -> list[dict[str, object]]:
        base: dict[str, object] = {
            "id": self.base_model,
            "object": "model",
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        adapters: list[dict[str, object]] = [
            {"id": name, "object": "model", "parent": self.base_model} for name in self.ready
        ]
        return [base, *adapters]

    async def _push(self, path: str, received: Received, writer: asyncio.StreamWriter) -> None:
        """The calls of stock TRL, as vLLM answers them."""
        if (failing := self.push_fails.get(path)) is not None:
            await answer_json(writer, {"error": "failing"}, status=failing)
        elif path == "/v1/load_lora_adapter":
            name = str(received.json()["lora_name"])
            if name in self.ready:
                message = f"The lora adapter '{name}' has already been loaded."
                await answer_json(writer, {"error": {"message": message}}, status=400)
            elif self.mounted is not None and received.json()["lora_path"] not in self.mounted:
                message = f"Loading lora {name} failed: No adapter found"
                await answer_json(writer, {"error": {"message": message}}, status=404)
            else:
                self.ready.add(name)
                if self.loses_answers:
                    writer.transport.abort()
                await answer(writer, b"Success", content_type="text/plain")
        elif path == "/v1/unload_lora_adapter":
            name = str(received.json()["lora_name"])
            known = name in self.ready
            self.ready.discard(name)
            await answer(
                writer, b"Success" if known else b'{"error": {}}', status=200 if known else 404
            )
        else:
            if path in ("/pause", "/resume"):
                self.paused = path == "/pause"
            await answer_json(writer, {"status": "done"})

    async def _generate(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await unless_closed(reader, self._behave(received, writer))
        except ConnectionError:
            self.cancelled += 1
            raise

    async def _behave(self, received: Received, writer: asyncio.StreamWriter) -> None:
        if self.behaviour is not None:
            await self.behaviour(received, writer)
            return
        model = received.json().get("model")
        if model not in (None, self.base_model) and model not in self.ready:
            message = f"The model `{model}` does not exist."
            await answer_json(writer, {"error": {"message": message}}, status=404)
            return
        await answer_json(writer, {"model": model, "served_by": self.port})

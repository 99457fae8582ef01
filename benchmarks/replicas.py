"""Replicas without engines, in a process of their own: the plugin's watcher, cache and status.

All that is missing is what vLLM does with the files. Each watcher has its own cache and its own
count of requests. Says on stdout, as one line of JSON each, when which part of a version was done;
``expect NAME`` and ``requests`` are understood on stdin, and ``GET /bucket_lora/status`` is
answered for the first watcher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from queue import Queue
from typing import Any

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.probe import Probe
from adapter_bucket.stores import open_store
from benchmarks.recorded_store import RecordedStore
from demo.processes import free_port
from tests.adapters import BASE
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.group import ServerGroup
from vllm_bucket_lora.service import Service
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.watcher import Watcher

SERVED = Served(base_model=BASE, max_loras=64, max_lora_rank=64, dtype="bfloat16")
START_S = 60.0


class NoEngine:
    """A ``Loader`` that takes every adapter at once, and says when its files were ready for it."""

    def __init__(self, number: int, store: RecordedStore) -> None:
        self._number = number
        self._store = store

    async def load(self, name: str, path: Path, probe: Probe | None) -> None:
        """Report the version: from here on an engine would read it."""
        loaded_at, calls = time.monotonic(), self._store.calls
        fetched = next(call for call in reversed(calls) if call.name == "download")
        noticed = next(
            call for call in reversed(calls) if call.new and call.ended_at <= fetched.began_at
        )
        _, version = parse_adapter_name(name) or ("", 0)
        ends = [noticed.ended_at, fetched.ended_at, loaded_at]
        say(watcher=self._number, version=version, ends=ends)

    async def forget(self, name: str) -> None:
        """Nothing is routed here."""

    def in_flight(self, name: str) -> int:
        """No request is ever served."""
        return 0

    def tidy(self, name: str) -> None:
        """Nothing is kept."""

    async def remove(self, name: str) -> None:
        """There is no slot."""


def say(**what: Any) -> None:
    """One line to the parent."""
    print(json.dumps(what), flush=True)


async def watch(options: argparse.Namespace, stack: AsyncExitStack) -> list[Service]:
    """Start all watchers; each lives until ``stack`` ends."""
    services, recorded = [], []
    shared = open_store(options.url)
    for number, poll_s in enumerate(options.poll_s):
        store = RecordedStore(shared)
        group = ServerGroup(options.folder / str(number), rank=0, count=1)
        service = Service(group, served=SERVED, replica_id=f"r-{number}")
        executor = stack.enter_context(ThreadPoolExecutor(1))
        shelf = Shelf(
            NoEngine(number, store),
            VersionCache(store.as_store, options.folder / str(number)),
            group,
            executor=executor,
            on_change=service.publish,
        )
        watcher = Watcher(
            store.as_store, shelf, group,
            served=SERVED, executor=executor, pattern=options.runs, poll_s=poll_s,
            on_change=service.publish,
        )  # fmt: skip
        service.start(shelf, watcher)
        stack.push_async_callback(service.stop)
        services.append(service)
        recorded.append(store)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = set()
    told = [0] * len(recorded)

    def obey(line: str) -> None:
        command, _, name = line.strip().partition(" ")
        if command == "requests":
            # The calls stay: a version that is being loaded looks for its own among them.
            new = [store.calls[at:] for store, at in zip(recorded, told, strict=True)]
            told[:] = [len(store.calls) for store in recorded]
            say(requests=[[call.name for call in calls] for calls in new])
        elif command == "expect":
            for service in services:
                tasks.add(task := loop.create_task(service.answer(name, 30.0)))
                task.add_done_callback(tasks.discard)

    loop.add_reader(sys.stdin, lambda: obey(sys.stdin.readline()))
    return services


async def serve(options: argparse.Namespace) -> None:
    """Watch, and answer about the first watcher, until killed."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async with AsyncExitStack() as stack:
        services = await watch(options, stack)

        async def status(request: Request) -> Response:
            query = request.query_params
            answer = await services[0].answer(query.get("adapter"), float(query.get("wait", 0)))
            return Response(answer.model_dump_json(), media_type="application/json")

        app = Starlette(routes=[Route("/bucket_lora/status", status)])
        config = uvicorn.Config(app, host="127.0.0.1", port=options.port, log_level="critical")
        listening = socket.create_server(("127.0.0.1", options.port))
        say(started=True)  # a question waits in the backlog from now on
        await uvicorn.Server(config).serve(sockets=[listening])


class Replicas:
    """The process, as its parent sees it. A context manager."""

    def __init__(self, url: str, folder: Path, poll_s: Sequence[float], runs: str = "*") -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._count = len(poll_s)
        command = [sys.executable, "-m", "benchmarks.replicas", url, str(folder), "--port"]
        self._process = subprocess.Popen(
            [*command, str(port), "--runs", runs, "--poll-s", *map(str, poll_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._said: Queue[dict[str, Any]] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Replicas:
        self._hear("started", START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def expect(self, name: str) -> None:
        """Make every watcher look now, as a trainer's question does."""
        self._tell(f"expect {name}")

    def requests(self) -> list[list[str]]:
        """Names of each watcher's store calls since the last question."""
        self._tell("requests")
        found: list[list[str]] = self._hear("requests", 10.0)["requests"]
        return found

    def ends(self, version: int, timeout_s: float = 60.0) -> dict[int, list[float]]:
        """When each watcher had noticed, fetched and verified the version."""
        found: dict[int, list[float]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < self._count:
            said = self._hear("version", max(deadline - time.monotonic(), 0.001))
            if said["version"] == version:
                found[said["watcher"]] = said["ends"]
        return found

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _hear(self, what: str, timeout_s: float) -> dict[str, Any]:
        while True:
            said = self._said.get(timeout=timeout_s)
            if "ended" in said:
                raise RuntimeError(f"the replicas ended while {what!r} was waited for")
            if what in said:
                return said

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"ended": True})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", default="*")
    parser.add_argument("--poll-s", type=float, nargs="+", required=True)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))

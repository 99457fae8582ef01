"""The proxy as a process, before replica processes that fail, are killed and are stopped.

    python -m tests.faults.proxy_run [--requests 20000] [--seed 1]

Every request is asked for like a rollout worker does it: again, while the error says that this can
help. At the end nothing may be lost, answered by another version or answered twice, the counters of
requests in flight are back at zero, and the proxy's metrics agree with what the clients saw.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11

from demo.processes import free_port
from tests.faults.faulty_replica import VERSIONS
from tests.proxy.proxy_harness import Answer, Client

REPLICAS = 4
IN_FLIGHT = 64
RETRIES = 30
"""As many as stock TRL makes."""

PROCESS_FAULTS = ("killed", "stopped", "stopped briefly")

FLAGS = ("--unresponsive-s=1", "--control-timeout-s=1", "--adapter-wait-s=5", "--slow-start-s=1")


@dataclass
class Outcome:
    """What the clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Of every exchange that ended; ``aborted`` for a stream that broke off."""
    answered: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """What was done to replica processes."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    metrics: str = ""

    def metric(self, name: str) -> dict[str, float]:
        """Samples of a metric, by label value."""
        found = re.findall(rf'^{name}\{{\w+="([^"]*)"\}} (\S+)$', self.metrics, re.MULTILINE)
        return {label: float(value) for label, value in found}

    @property
    def met_every_fault(self) -> bool:
        """Whether each of ``PROCESS_FAULTS`` was done to some replica."""
        return set(self.faults) == set(PROCESS_FAULTS)

    def problems(self, requests: int) -> list[str]:
        """Everything that must not be; empty if all is well.

        Args:
            requests: At least so many were to be made.
        """
        found = list(self.wrong)
        made = max(requests, len(self.answered))
        lost = [number for number in range(made) if self.answered[number] != 1]
        if lost:
            found.append(f"{len(lost)} requests not answered exactly once, first {lost[:5]}")
        flying = self.metric("bucket_lora_proxy_in_flight")
        if len(flying) != REPLICAS or any(flying.values()):
            found.append(f"in flight at the end: {flying}")
        counted = self.metric("bucket_lora_proxy_requests_total")
        if counted != dict(self.statuses):
            found.append(f"metrics count {counted}, clients saw {dict(self.statuses)}")
        sent = sum(self.metric("bucket_lora_proxy_replica_requests_total").values())
        if sent < self.statuses["200"]:
            found.append(f"{sent} requests sent to replicas for {self.statuses['200']} answers")
        routed = sum(self.metric("bucket_lora_proxy_routed_total").values())
        if routed != sent:
            found.append(f"{routed} decisions, {sent} requests sent to replicas")
        return found


class Rollouts:
    """One worker: a kept connection, one request after another."""

    def __init__(self, port: int, outcome: Outcome, rng: random.Random) -> None:
        self._port = port
        self._outcome = outcome
        self._rng = rng
        self._client: Client | None = None

    async def generate(self, number: int) -> None:
        """Have one request answered."""
        model = self._rng.choice(VERSIONS)
        request = {
            "model": model,
            "prompt": [number // 8] * 64,
            "number": number,
            "stream": number % 3 == 0,
            "max_tokens": 64,
        }
        last = ""
        for _ in range(RETRIES):
            answer = await self._exchange(json.dumps(request).encode())
            if answer is None:
                continue
            if answer.status == 200:
                self._check(answer, model, number)
                return
            last = f"{answer.status} {answer.body[:200]!r}"
            await asyncio.sleep(0.05)
        self._outcome.wrong.append(f"request {number} was given up: {last}")

    async def _exchange(self, body: bytes) -> Answer | None:
        if self._client is None:
            self._client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        try:
            await self._client.send("POST", "/v1/completions", body=body)
            answer = await self._client.answer()
        except h11.RemoteProtocolError:
            self._outcome.statuses["aborted"] += 1
            self._client.close()
            self._client = None
            return None
        self._outcome.statuses[str(answer.status)] += 1
        return answer

    def _check(self, answer: Answer, model: str, number: int) -> None:
        document = answer.json()
        if (document.get("served"), document.get("number")) != (model, number):
            self._outcome.wrong.append(f"{model} number {number} got {str(document)[:200]}")
        self._outcome.answered[number] += 1

    async def close(self) -> None:
        """Look for an answer that nobody asked for, then close."""
        if self._client is None:
            return
        try:
            async with asyncio.timeout(0.2):
                surplus = await self._client.reader.read(100)
            self._outcome.wrong.append(f"the proxy sent {surplus!r} unasked, or closed")
        except TimeoutError:
            pass
        self._client.close()


class Replicas:
    """The replica processes, and what happens to them."""

    def __init__(self, ports: list[int], outcome: Outcome, rng: random.Random) -> None:
        self.ports = ports
        self._outcome = outcome
        self._rng = rng
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, port: int) -> None:
        seed = str(self._rng.randrange(10**6))
        self._processes[port] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.faults.faulty_replica", str(port), seed
        )

    async def torment(self) -> None:
        """Kill, stop and restart replicas, one at a time, until cancelled."""
        for fault in itertools.cycle(PROCESS_FAULTS):
            await asyncio.sleep(self._rng.uniform(0.3, 1.0))
            port = self._rng.choice(self.ports)
            process = self._processes[port]
            self._outcome.faults[fault] += 1
            if fault == "killed":
                process.kill()
                await process.wait()
                await asyncio.sleep(self._rng.uniform(0.0, 0.5))
                await self.start(port)
                continue
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(0.3 if fault == "stopped briefly" else 3.0)
            finally:
                process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def running_proxy(ports: list[int]) -> AsyncIterator[int]:
    """Start the proxy as a process. Yields its port once all replicas are in rotation."""
    port = free_port()
    replicas = [f"--replica=http://127.0.0.1:{replica}" for replica in ports]
    command = [sys.executable, "-m", "bucket_lora_proxy", f"--port={port}", *replicas, *FLAGS]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while (healthy := await _healthy(port)) < len(ports):
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the proxy sees {healthy} replicas, exit {process.returncode}")
            await asyncio.sleep(0.1)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def _healthy(port: int) -> int:
    try:
        answer = await _get(port, "/health")
    except OSError:
        return 0
    return int(answer.json()["healthy"])


async def _get(port: int, target: str) -> Answer:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        await client.send("GET", target)
        return await client.answer()
    finally:
        client.close()


async def run(requests: int, seed: int) -> Outcome:
    """Run it all. The outcome says what was seen; ``problems`` whether that is good."""
    rng = random.Random(seed)
    outcome = Outcome()
    replicas = Replicas([free_port() for _ in range(REPLICAS)], outcome, rng)
    for port in replicas.ports:
        await replicas.start(port)
    begun = time.monotonic()
    try:
        async with running_proxy(replicas.ports) as proxy:
            numbers = itertools.count()

            async def worker() -> None:
                rollouts = Rollouts(proxy, outcome, rng)
                # A fast machine is through before every fault was met: then it goes on.
                while (number := next(numbers)) < requests or not outcome.met_every_fault:
                    await rollouts.generate(number)
                await rollouts.close()

            tormenting = asyncio.create_task(replicas.torment())
            try:
                await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
            finally:
                tormenting.cancel()
                await asyncio.gather(tormenting, return_exceptions=True)
            outcome.metrics = (await _get(proxy, "/metrics")).body.decode()
    finally:
        await replicas.stop()
    outcome.seconds = time.monotonic() - begun
    return outcome


def main() -> int:
    """Run, print what was seen, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    outcome = asyncio.run(run(args.requests, args.seed))
    answered = sum(outcome.answered.values())
    print(f"{answered} of {args.requests} requests answered in {outcome.seconds:.0f} s")
    print("exchanges by status:", dict(sorted(outcome.statuses.items())))
    print("processes:", dict(outcome.faults))
    print("retries:", outcome.metric("bucket_lora_proxy_retries_total"))
    problems = outcome.problems(args.requests)
    for problem in problems:
        print("WRONG:", problem)
    print("nothing lost, mixed up or delivered twice" if not problems else "FAILED")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

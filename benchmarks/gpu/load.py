"""A steady number of requests in flight, as a process of its own.

Started by ``hot_swap``. Commands on standard input: ``model NAME`` sets the model that new requests
name; ``report`` prints one JSON line about the time since the last report; end of input ends it.
Part of the requests stream, and the gaps between their tokens are what a user would notice; the
others do not, so that the server's work on streams does not limit what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.gpu.report import percentile

MAX_ERRORS_KEPT = 3


@dataclass
class Tally:
    """What happened since the last report."""

    gaps_ms: list[float] = field(default_factory=list)
    finished: int = 0
    errors: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "gap_p50_ms": percentile(self.gaps_ms, 50),
                "gap_p99_ms": percentile(self.gaps_ms, 99),
                "gap_max_ms": max(self.gaps_ms, default=float("nan")),
                "gaps": len(self.gaps_ms),
                "finished": self.finished,
                "failed": len(self.errors),
                "errors": self.errors[:MAX_ERRORS_KEPT],
            }
        )


class Load:
    """The requests in flight."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(0)
        self._model: str | None = None
        self._started = asyncio.Event()
        self.tally = Tally()

    async def run(self) -> None:
        """Keep requests in flight until standard input ends."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            workers = [
                asyncio.create_task(self._worker(session, stream=number < self._options.streams))
                for number in range(self._options.in_flight)
            ]
            await self._obey()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _obey(self) -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command, _, value = line.strip().partition(" ")
            if command == "model":
                self._model = value
                self._started.set()
            elif command == "report":
                tally, self.tally = self.tally, Tally()
                print(tally.as_json(), flush=True)

    async def _worker(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        await self._started.wait()
        while True:
            # Random lengths, or requests that end together start together ever after, and many
            # prompts in one step make it long.
            tokens = self._random.randrange(
                self._options.tokens // 2, self._options.tokens * 3 // 2
            )
            try:
                await self._request(session, tokens, stream=stream)
                self.tally.finished += 1
            except (aiohttp.ClientError, RuntimeError) as error:
                self.tally.errors.append(str(error)[:300])
                await asyncio.sleep(0.2)

    async def _request(self, session: aiohttp.ClientSession, tokens: int, *, stream: bool) -> None:
        prompt = [self._random.randrange(5, 255) for _ in range(self._options.prompt)]
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": stream,
        }
        async with session.post(f"{self._options.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            if not stream:
                await response.read()
                return
            before = None
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if before is not None:
                    self.tally.gaps_ms.append((now - before) * 1e3)
                before = now


def main() -> None:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True, help="how many of them stream")
    parser.add_argument("--prompt", type=int, required=True, help="tokens")
    parser.add_argument("--tokens", type=int, required=True, help="of an answer, on average")
    asyncio.run(Load(parser.parse_args()).run())


if __name__ == "__main__":
    main()

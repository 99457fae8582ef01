"""What the last minutes were like: a sample of the counters every few seconds. Bounded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from bucket_lora_proxy.metrics import Metrics

SAMPLE_S = 2.0
SAMPLES = 150
"""Five minutes."""


@dataclass(frozen=True)
class Sample:
    """The counters at one time. All of them only grow."""

    at: float
    finished: float
    seconds: float
    """Sum of the time that successful and failed generations took."""
    prompt_tokens: float
    matched_tokens: float
    sent: Mapping[str, float]
    """Generations by replica."""


class History:
    """Samples, and what follows from them."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.take()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Sample until the block is left."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.take()

    def take(self) -> None:
        """Take one sample."""
        metrics = self._metrics
        self._samples.append(
            Sample(
                at=self._clock(),
                finished=metrics.requests.total,
                seconds=metrics.seconds.seconds,
                prompt_tokens=metrics.prompt_tokens.total,
                matched_tokens=metrics.matched_tokens.total,
                sent=dict(metrics.attempts.values),
            )
        )

    def rates(self) -> list[float]:
        """Generations a second, between each two samples."""
        return [
            (after.finished - before.finished) / max(after.at - before.at, 1e-9)
            for before, after in pairwise(self._samples)
        ]

    def span_s(self) -> float:
        """How far the samples reach back."""
        return self._samples[-1].at - self._samples[0].at

    def affinity(self) -> float | None:
        """Share of the prompt tokens sent that their replica is taken to have had in its cache."""
        first, last = self._samples[0], self._samples[-1]
        sent = last.prompt_tokens - first.prompt_tokens
        return (last.matched_tokens - first.matched_tokens) / sent if sent else None

    def mean_seconds(self) -> float | None:
        """Mean time of a generation."""
        first, last = self._samples[0], self._samples[-1]
        count = last.finished - first.finished
        return (last.seconds - first.seconds) / count if count else None

    def sent(self) -> dict[str, float]:
        """Generations sent to each replica."""
        first, last = self._samples[0], self._samples[-1]
        return {url: count - first.sent.get(url, 0.0) for url, count in last.sent.items()}

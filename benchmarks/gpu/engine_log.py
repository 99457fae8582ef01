"""What the engine's logs say: throughput, gaps between steps, engine time that a span took. Pure.

A step's entry in the log is the moment at which it was started, how many requests it served, and
how many tokens of theirs it took. In a steady engine the time from one start to the next is the
time of a step, and whatever keeps the engine loop from starting the next one shows there. Every
request that a step serves gets one token: prompts are shorter than what a step takes.
"""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, SPANS = "steps.txt", "spans.jsonl"
FLUSH_S = 0.2
"""How long a step may stay unwritten while steps follow."""


@dataclass(frozen=True)
class Step:
    """One engine step: ``at`` is its start on the system-wide monotonic clock, in seconds."""

    at: float
    requests: int
    tokens: int

    @property
    def kind(self) -> int:
        """Steps of one kind take about the same time: 0 without a prompt, else by its tokens."""
        return min(4, -(-(self.tokens - self.requests) // 128))


Span = tuple[float, float]
"""Start and end, on the same clock."""


def read_steps(path: Path, since: float) -> list[Step]:
    """Steps started at or after a time."""
    steps = []
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        for line in file:
            at, requests, *tokens = line.split()
            if len(tokens) == 1 and line.endswith("\n") and float(at) >= since:
                steps.append(Step(float(at), int(requests), int(tokens[0])))
    return steps


def read_spans(path: Path, kind: str, window: Span) -> list[dict[str, Any]]:
    """Loads or preparations that began within a time."""
    if not path.exists():
        return []
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    return [s for s in spans if s["kind"] == kind and window[0] <= s["start"] < window[1]]


def within(steps: Sequence[Step], window: Span) -> list[Step]:
    """Steps started within a time."""
    return [step for step in steps if window[0] <= step.at < window[1]]


def rate(steps: Sequence[Step], spans: Sequence[Span]) -> float:
    """Tokens a second over some stretches of time together; NaN if they are empty."""
    seconds = sum(end - start for start, end in spans)
    tokens = sum(step.requests for span in spans for step in within(steps, span))
    return tokens / seconds if seconds > 0 else float("nan")


def periods_ms(steps: Sequence[Step]) -> list[float]:
    """Times from each step's start to the next one's."""
    return [(b.at - a.at) * 1e3 for a, b in itertools.pairwise(steps)]


def outside(spans: Sequence[Span], window: Span) -> list[Span]:
    """What the spans, in order, leave of a window."""
    left, at = [], window[0]
    for start, end in spans:
        if start > at:
            left.append((at, min(start, window[1])))
        at = max(at, end)
    if at < window[1]:
        left.append((at, window[1]))
    return left


def lost_ms(steps: Sequence[Step], spans: Sequence[Span], window: Span) -> list[float]:
    """Engine time that each span cost, against the rest of the window.

    A span's own time, less the time that its tokens take at the rate between the spans. Nothing is
    said unless the spans leave a third of the window: the rate would rest on too little.
    """
    rest = outside(spans, window)
    if sum(end - start for start, end in rest) < (window[1] - window[0]) / 3:
        return []
    base = rate(steps, rest)
    return [
        ((end - start) - sum(step.requests for step in within(steps, (start, end))) / base) * 1e3
        for start, end in spans
        if end <= window[1]
    ]

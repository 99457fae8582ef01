"""From the metrics of a run to the figures that the demo prints. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EDGE_STEPS = 10
"""The first and the last steps whose rewards are compared."""


@dataclass(frozen=True)
class Spread:
    """Middle and tail of some measurements, seconds."""

    count: int
    p50: float
    p95: float


@dataclass(frozen=True)
class Summary:
    """Figures of one run."""

    steps: int
    reward_first: float
    reward_last: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    syncs: int
    skipped: int
    dropped_stale: int
    snapshot: Spread
    publish: Spread
    ready: Spread
    blocked: Spread
    """What the optimizer loop waited for a sync in all."""


def steps_only(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of optimizer steps: the trainer's closing row has no reward."""
    return [row for row in rows if row.get("reward") is not None]


def summarise(rows: Iterable[Mapping[str, Any]]) -> Summary:
    """Compute the figures.

    Args:
        rows: What the trainer logged, one mapping a step.

    Raises:
        ValueError: there is no step with a reward.
    """
    steps = steps_only(rows)
    if not steps:
        raise ValueError("the trainer logged no step with a reward")
    rewards = series(steps, "reward")
    ratios = series(steps, "ratio")
    return Summary(
        steps=len(steps),
        reward_first=_mean(rewards[:EDGE_STEPS]),
        reward_last=_mean(rewards[-EDGE_STEPS:]),
        ratio_mean=_mean(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        syncs=len(series(steps, "bucket/version")),
        skipped=int(max(series(steps, "bucket/skipped"), default=0)),
        dropped_stale=int(sum(series(steps, "sample/dropped_stale_total"))),
        snapshot=spread(series(steps, "bucket/snapshot_s")),
        publish=spread(series(steps, "bucket/publish_s")),
        ready=spread(series(steps, "bucket/ready_s")),
        blocked=spread(series(steps, "perf/weight_sync_s")),
    )


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Values of one metric, in order; steps without it are passed over."""
    return [float(row[name]) for row in rows if row.get(name) is not None]


def spread(values: Sequence[float]) -> Spread:
    """Median and 95th percentile (nearest rank); NaN of nothing."""
    if not values:
        return Spread(0, math.nan, math.nan)
    ordered = sorted(values)
    return Spread(len(ordered), _nearest_rank(ordered, 0.5), _nearest_rank(ordered, 0.95))


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

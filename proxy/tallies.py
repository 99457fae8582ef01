"""Counters and histograms of one event loop: plain numbers, read when somebody scrapes.

A generation counts twelve values. ``prometheus_client``'s own counters take a lock and several
checks for each, which together cost as much as to route the request. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter, by the values of at most one label.

    Args:
        name: without ``_total``.
        text: what it counts.
        label: name of the label; ``""`` for none.
    """

    def __init__(self, name: str, text: str, label: str = "") -> None:
        self._name, self._text, self._label = name, text, label
        self.values: defaultdict[str, float] = defaultdict(float)
        if not label:
            self.values[""] = 0.0

    def add(self, value: str = "", amount: float = 1.0) -> None:
        """Count something with this value of the label."""
        self.values[value] += amount

    def forget(self, value: str) -> None:
        """Drop a value of the label that will not come again."""
        self.values.pop(value, None)

    @property
    def total(self) -> float:
        """Over all values of the label."""
        return sum(self.values.values())

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else []
        )
        for value, count in self.values.items():
            family.add_metric([value] if self._label else [], count)
        yield family


@dataclass(slots=True)
class _Row:
    counts: list[int]
    """By bucket; the last one is above all bounds."""
    seconds: float = 0.0


class Timing(Collector):
    """A histogram of seconds, by the values of at most one label, all known before.

    Args:
        name: of the metric.
        text: what is timed.
        bounds: upper ends of the buckets, in order.
        label: name of the label; ``""`` for none.
        values: of the label.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        *,
        label: str = "",
        values: Sequence[str] = ("",),
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self._bounds = list(bounds)
        self._rows = {value: _Row([0] * (len(bounds) + 1)) for value in values}

    def observe(self, seconds: float, value: str = "") -> None:
        """Take in one duration."""
        row = self._rows[value]
        row.counts[bisect_left(self._bounds, seconds)] += 1  # a bound belongs to what is below
        row.seconds += seconds

    @property
    def seconds(self) -> float:
        """Sum of all durations."""
        return sum(row.seconds for row in self._rows.values())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else []
        )
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for value, row in self._rows.items():
            below, buckets = 0, []
            for end, count in zip(ends, row.counts, strict=True):
                below += count
                buckets.append((end, float(below)))
            family.add_metric([value] if self._label else [], buckets, row.seconds)
        yield family

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from bucket_lora_proxy.tallies import Tally, Timing

BOUNDS = (0.005, 0.1, 1.0, 30.0)


def page(collector: Collector) -> list[str]:
    """The exposition, without the times at which prometheus_client's own metrics were made."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_a_tally_shows_what_a_counter_of_prometheus_client_would(
    counted: list[tuple[str, int]],
) -> None:
    tally, counter = Tally("n", "text", "kind"), Counter("n", "text", ["kind"], registry=None)
    plain, without = Tally("n", "text"), Counter("n", "text", registry=None)
    for kind, amount in counted:
        tally.add(kind, amount)
        counter.labels(kind).inc(amount)
        plain.add(amount=amount)
        without.inc(amount)
    assert page(tally) == page(counter)
    assert page(plain) == page(without)
    assert tally.total == plain.total == sum(amount for _, amount in counted)
    tally.forget("a")
    tally.forget("never seen")
    assert set(tally.values) <= {"b"}


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS)))
def test_a_timing_shows_what_a_histogram_of_prometheus_client_would(took: list[float]) -> None:
    timing = Timing("s", "text", BOUNDS, label="phase", values=["a", "b"])
    histogram = Histogram("s", "text", ["phase"], buckets=BOUNDS, registry=None)
    for phase in "ab":
        histogram.labels(phase)
    plain, without = Timing("s", "t", BOUNDS), Histogram("s", "t", buckets=BOUNDS, registry=None)
    for number, seconds in enumerate(took):
        timing.observe(seconds, "ab"[number % 2])
        histogram.labels("ab"[number % 2]).observe(seconds)
        plain.observe(seconds)
        without.observe(seconds)
    assert page(timing) == page(histogram)
    assert page(plain) == page(without)
    assert plain.seconds == pytest.approx(sum(took))  # newer Pythons sum more exactly

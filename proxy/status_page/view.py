"""What the status page shows, as plain values. Reads the fleet; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adapter_bucket.layout import parse_adapter_name
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.recent_errors import RecentError, RecentErrors
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.runs import RunRow, run_rows
from bucket_lora_proxy.status_page.history import History


@dataclass(frozen=True)
class ReplicaRow:
    """One replica."""

    url: str
    source: str
    state: str
    """One word: up, starting, draining, failing, held, down."""
    reason: str
    """Why it is not simply up."""
    in_flight: int
    outstanding: float
    sent: float
    """Generations in the time that the history covers."""
    versions: str
    base_model: str
    cached_tokens: int
    """Prompt tokens that the router takes it to hold."""


@dataclass(frozen=True)
class PageView:
    """Everything on the page."""

    replicas: list[ReplicaRow]
    runs: list[RunRow]
    note: str
    rates: list[float]
    span_s: float
    affinity: float | None
    imbalance: float | None
    """Most generations of a replica, as a multiple of the mean."""
    mean_seconds: float | None
    outcomes: dict[str, float]
    answers: dict[str, float]
    waits: float
    retries: dict[str, float]
    errors: list[RecentError] = field(default_factory=list)


def view_of(
    fleet: Fleet, metrics: Metrics, history: History, errors: RecentErrors, now: float
) -> PageView:
    """Put the page together. ``now`` is the loop's time."""
    sent = history.sent()
    members = {replica.url for replica in fleet.replicas}
    return PageView(
        replicas=[_replica_row(replica, sent, now) for replica in fleet.replicas],
        runs=run_rows(fleet.replicas),
        note=fleet.note,
        rates=history.rates(),
        span_s=history.span_s(),
        affinity=history.affinity(),
        imbalance=imbalance([count for url, count in sent.items() if url in members]),
        mean_seconds=history.mean_seconds(),
        outcomes=dict(metrics.outcomes.values),
        answers=dict(metrics.requests.values),
        waits=metrics.waited.total,
        retries=dict(metrics.retries.values),
        errors=errors.newest_first(),
    )


def imbalance(counts: Sequence[float]) -> float | None:
    """Largest of the counts as a multiple of their mean; ``None`` if all are 0."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else None


def _replica_row(replica: Replica, sent: dict[str, float], now: float) -> ReplicaRow:
    state, reason = _state(replica, now)
    return ReplicaRow(
        url=replica.url,
        source=str(replica.source),
        state=state,
        reason=reason,
        in_flight=replica.in_flight,
        outstanding=replica.outstanding,
        sent=sent.get(replica.url, 0.0),
        versions=version_ranges(replica.ready),
        base_model=", ".join(sorted(replica.base_models)),
        cached_tokens=replica.cached_tokens(),
    )


def _state(replica: Replica, now: float) -> tuple[str, str]:
    if not replica.up:
        return "down", replica.reason
    if replica.held is not None:
        return "held", replica.held
    if replica.draining:
        return "draining", "asked for by an operator"
    if not replica.breaker.closed:
        return "failing", "its generations keep failing"
    warmth = replica.warmth(now)
    if warmth < 1:
        return "starting", f"takes {warmth:.0%} of its share"
    return "up", replica.status.error or "" if replica.status is not None else ""


def version_ranges(names: Sequence[str] | frozenset[str]) -> str:
    """Adapter names in few words: ``run v3–v5 v9``; other names as they are."""
    runs: dict[str, list[int]] = {}
    others = []
    for name in sorted(names):
        parsed = parse_adapter_name(name)
        if parsed is None:
            others.append(name)
        else:
            runs.setdefault(parsed[0], []).append(parsed[1])
    parts = [f"{run} {_ranges(sorted(versions))}" for run, versions in sorted(runs.items())]
    return "; ".join(parts + others)


def _ranges(versions: list[int]) -> str:
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    return " ".join(f"v{a}" if a == b else f"v{a}–v{b}" for a, b in spans)

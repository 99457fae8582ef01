"""Prometheus metrics. State that the fleet holds anyway is read at scrape time, not counted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.replicas import Source
from bucket_lora_proxy.runs import run_rows
from bucket_lora_proxy.tallies import Tally, Timing

CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"

_PREFIX = "bucket_lora_proxy_"

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class _FleetState(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the fleet."""
        members = GaugeMetricFamily(
            "bucket_lora_proxy_members",
            "Replicas in the fleet, by how they came to be in it and whether they are up",
            labels=["source", "state"],
        )
        counts = {(source, state): 0 for source in Source for state in ("up", "down")}
        for replica in self._fleet.replicas:
            counts[replica.source, "up" if replica.up else "down"] += 1
        for (source, state), count in counts.items():
            members.add_metric([source, state], count)
        yield members
        up = GaugeMetricFamily(
            "bucket_lora_proxy_replica_up", "1 for a replica in rotation", labels=["replica"]
        )
        flying = GaugeMetricFamily(
            "bucket_lora_proxy_in_flight", "Generations a replica is working on", labels=["replica"]
        )
        by_model = GaugeMetricFamily(
            "bucket_lora_proxy_in_flight_by_model",
            "Generations a replica is working on, by the version (or base model) they name",
            labels=["replica", "model"],
        )
        outstanding = GaugeMetricFamily(
            "bucket_lora_proxy_outstanding_tokens",
            "Tokens a replica still has to compute for them, as the router counts",
            labels=["replica"],
        )
        ready = GaugeMetricFamily(
            "bucket_lora_proxy_adapters_ready", "Adapters ready on a replica", labels=["replica"]
        )
        tripped = GaugeMetricFamily(
            "bucket_lora_proxy_breaker_open",
            "1 for a replica whose generations keep failing",
            labels=["replica"],
        )
        for replica in self._fleet.replicas:
            tripped.add_metric([replica.url], float(not replica.breaker.closed))
            up.add_metric([replica.url], float(replica.in_rotation))
            flying.add_metric([replica.url], replica.in_flight)
            ready.add_metric([replica.url], len(replica.ready))
            outstanding.add_metric([replica.url], replica.outstanding)
            for model, count in replica.by_model.items():
                by_model.add_metric([replica.url, model], count)
        yield from (up, flying, by_model, outstanding, ready, tripped)
        latest = GaugeMetricFamily(
            "bucket_lora_proxy_run_latest_version",
            "Newest version of a run that any replica in rotation knows of",
            labels=["run"],
        )
        lag = GaugeMetricFamily(
            "bucket_lora_proxy_run_lag_versions",
            "By how many versions the slowest replica in rotation is behind it",
            labels=["run"],
        )
        for run in run_rows(self._fleet.replicas):
            latest.add_metric([run.run_id], run.latest)
            lag.add_metric([run.run_id], run.lag)
        yield from (latest, lag)


class Metrics:
    """All counters of one proxy, in a registry of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetState(fleet))
        ProcessCollector(registry=self.registry)  # memory, CPU time, open files
        count = self._tally
        self.requests = count("requests", "Generations by final status", "status")
        self.attempts = count("replica_requests", "Generations sent, by replica", "replica")
        self.retries = count(
            "retries",
            "Generations sent to a further replica, by what was wrong with the one before",
            "cause",
        )
        self.outcomes = count(
            "routed",
            "Routing decisions: hit (the replica holds at least half of the prompt), spill "
            "(another one does, but is overloaded), new (none does)",
            "outcome",
        )
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens sent")
        self.matched_tokens = count(
            "matched_prompt_tokens",
            "Prompt tokens that the replica is taken to have in its prefix cache",
        )
        self.disconnects = count(
            "client_disconnects", "Generations cancelled because the client left"
        )
        self.waited = count("adapter_waits", "Generations that had to wait for their adapter")
        self.membership = count(
            "membership_changes",
            "Replicas that joined or left the fleet while the proxy ran",
            "change",
        )
        self.seconds = Timing(
            f"{_PREFIX}request_seconds",
            "Time from a complete request to a complete answer",
            _SECONDS,
        )
        self.phases = Timing(
            f"{_PREFIX}phase_seconds",
            "Parts of that time: adapter_wait (of those that had to wait), first_byte (until the "
            "head of a replica's answer, 200 only), answer (from there to its end)",
            _SECONDS,
            label="phase",
            values=("adapter_wait", "first_byte", "answer"),
        )
        self.registry.register(self.seconds)
        self.registry.register(self.phases)

    def _tally(self, name: str, text: str, label: str = "") -> Tally:
        tally = Tally(f"{_PREFIX}{name}", text, label)
        self.registry.register(tally)
        return tally

    def routed(self, outcome: str, prompt_tokens: int, matched_tokens: int) -> None:
        """Count one decision."""
        self.outcomes.add(outcome)
        self.prompt_tokens.add(amount=prompt_tokens)
        self.matched_tokens.add(amount=matched_tokens)

    def forget(self, replica: str) -> None:
        """Drop the counters of a replica that left: spot replicas never come back as they were."""
        self.attempts.forget(replica)

    def page(self) -> bytes:
        """The exposition of everything."""
        return generate_latest(self.registry)

"""The runs as the replicas in rotation last told of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adapter_bucket.layout import parse_adapter_name
from bucket_lora_proxy.replicas import Replica


@dataclass(frozen=True)
class RunRow:
    """One run."""

    run_id: str
    state: str
    latest: int
    """Newest version that any replica knows to be published."""
    newest_ready: int
    """Newest version that is ready anywhere; 0 for none."""
    ready_on: int
    replicas: int
    lag: int
    """Versions by which the slowest replica is behind the newest one."""
    trouble: str


def run_rows(replicas: Sequence[Replica]) -> list[RunRow]:
    """The runs that the replicas in rotation know, by what they last said."""
    serving = [replica for replica in replicas if replica.in_rotation]
    newest: dict[str, dict[str, int]] = {}
    latest: dict[str, int] = {}
    states: dict[str, set[str]] = {}
    trouble: dict[str, str] = {}
    for replica in serving:
        for name in replica.ready:
            if (parsed := parse_adapter_name(name)) is not None:
                by_url = newest.setdefault(parsed[0], {})
                by_url[replica.url] = max(by_url.get(replica.url, 0), parsed[1])
        for run_id, run in replica.status.runs.items() if replica.status else ():
            newest.setdefault(run_id, {})
            latest[run_id] = max(latest.get(run_id, 0), run.latest)
            states.setdefault(run_id, set()).add(run.state)
            said = run.refusal or run.error or next(iter(run.refused.values()), "")
            if said:
                trouble.setdefault(run_id, f"{replica.url}: {said}")
    rows = []
    for run_id, by_url in sorted(newest.items()):
        top = max(by_url.values(), default=0)
        published = max(latest.get(run_id, 0), top)
        slowest = min((by_url.get(replica.url, 0) for replica in serving), default=0)
        rows.append(
            RunRow(
                run_id=run_id,
                state=", ".join(sorted(states.get(run_id, {"pushed"}))),
                latest=published,
                newest_ready=top,
                ready_on=sum(version == top for version in by_url.values()) if top else 0,
                replicas=len(serving),
                lag=published - slowest,
                trouble=trouble.get(run_id, ""),
            )
        )
    return rows

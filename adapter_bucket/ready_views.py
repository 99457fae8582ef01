"""What status answers say about one adapter: on one replica, and on the fleet. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.status import AdapterStatus, ReadyState, ReplicaStatus


def on_replica(status: ReplicaStatus, name: str) -> AdapterStatus:
    """State of an adapter on one replica, from its last status answer.

    An answer about this very adapter is taken as it is. Otherwise the run's entry decides: what is
    neither ready nor refused is retired if it is older than the window, else pending.
    """
    if status.adapter is not None and status.adapter.name == name:
        return status.adapter
    if name in status.ready:
        return AdapterStatus(name=name, state=ReadyState.READY, ready_on=1)
    parsed = parse_adapter_name(name)
    run = status.runs.get(parsed[0]) if parsed else None
    if parsed is None or run is None:
        reason = status.error or "the replica knows no such run (yet)"
        return AdapterStatus(name=name, state=ReadyState.PENDING, reason=reason)
    version = parsed[1]
    if version in run.ready:
        return AdapterStatus(name=name, state=ReadyState.READY, ready_on=1)
    if version in run.refused:
        return AdapterStatus(
            name=name,
            state=ReadyState.REFUSED,
            reason=run.refused[version],
            retried=version in run.retried,
        )
    if run.refusal:
        return AdapterStatus(name=name, state=ReadyState.REFUSED, reason=run.refusal)
    if version <= run.latest - run.window:
        reason = f"version {version} is older than the window of {run.window}: {run.latest} is out"
        return AdapterStatus(name=name, state=ReadyState.RETIRED, reason=reason)
    reason = run.error or (
        "not in the manifest yet" if version > run.latest else "being fetched or loaded"
    )
    return AdapterStatus(name=name, state=ReadyState.PENDING, reason=reason)


def on_fleet(
    views: Mapping[str, AdapterStatus], name: str, *, policy: ReadyPolicy
) -> AdapterStatus:
    """State of an adapter on the fleet.

    Args:
        views: by replica URL, for every replica that answers. A replica that is down is not
            counted: it is not sent anything before it is back and has the adapter ready.
        name: the adapter.
        policy: on how many of them it must be ready.

    Returns:
        Ready as soon as enough replicas are; refused or retired once that cannot happen any more;
        else pending. The reason names the replica it comes from. A refusal is ``retried`` if so
        many replicas may do better with the next version that they are enough.
    """
    counts = Counter(view.state for view in views.values())
    ready, total = counts[ReadyState.READY], len(views)
    lost = counts[ReadyState.REFUSED] + counts[ReadyState.RETIRED]
    for_good = sum(v.state is ReadyState.REFUSED and not v.retried for v in views.values())
    reason: str | None = None
    required = policy.required(total)
    if total and ready >= required:
        state = ReadyState.READY
    elif total >= required and total - lost < required:
        refused = counts[ReadyState.REFUSED] > 0
        state = ReadyState.REFUSED if refused else ReadyState.RETIRED
        reason = _reason(views, state)
    else:
        state = ReadyState.PENDING
        reason = _reason(views, state) if total else "no replica answers"
        if 0 < total < required:
            reason = f"only {total} of {required} replicas answer; {reason}"
    return AdapterStatus(
        name=name,
        state=state,
        reason=reason,
        ready_on=ready,
        retried=state is ReadyState.REFUSED and total - for_good >= required,
        replicas=total,
    )


def _reason(views: Mapping[str, AdapterStatus], state: ReadyState) -> str:
    shown = [f"{url}: {view.reason}" for url, view in views.items() if view.state is state]
    more = f" (and {len(shown) - 3} more)" if len(shown) > 3 else ""
    return "; ".join(shown[:3]) + more

"""What this server says is ready: the states of its processes, joined. Pure.

A version counts as ready when every process serves it, as refused when any process refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from adapter_bucket.layout import adapter_name, parse_adapter_name
from adapter_bucket.manifest import RunState, VersionEntry
from adapter_bucket.status import (
    UNREAD,
    AdapterStatus,
    ProbeResult,
    ReadyState,
    ReplicaStatus,
    RunStatus,
    VersionStatus,
)
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.group import RunView, ServerState
from vllm_bucket_lora.run import Run
from vllm_bucket_lora.slots import Admission

FAILED = ProbeResult.FAILED


def view_of(run: Run, passed: Mapping[int, ProbeResult], admission: Admission) -> RunView | None:
    """One run as this process sees it, or ``None`` if there is nothing to say of it yet.

    Args:
        run: The run.
        passed: The versions that are ready, with what became of their probes.
        admission: Which runs have slots.
    """
    if run.manifest is None:
        # Unsigned, malformed, unreadable: the reason must be seen, though nothing can be believed.
        return RunView(state=UNREAD, latest=0, window=1, fault=run.fault) if run.fault else None
    return RunView(
        state=run.manifest.state.value,
        latest=run.manifest.latest,
        window=run.manifest.window,
        published=sorted(run.entries()),
        ready=sorted(passed),
        refused=run.faults(),
        retried=run.faulty(),
        pending={version: retry.reason for version, retry in run.retries.items()},
        probes={**passed, **dict.fromkeys(run.probe_failed, ProbeResult.FAILED)},
        refusal=run.base_fault or admission.refused.get(run.run_id),
        fault=run.fault or admission.unkept.get(run.run_id),
    )


def join(states: Sequence[ServerState | None]) -> ServerState:
    """The state of the server as a whole. A process that has not spoken yet has nothing ready."""
    spoken = [state for state in states if state is not None]
    runs: dict[str, RunView] = {}
    for run_id in {run_id for state in spoken for run_id in state.runs}:
        views = [state.runs[run_id] for state in spoken if run_id in state.runs]
        everywhere = len(views) == len(states)
        runs[run_id] = _join_run(views, everywhere=everywhere)
    fault = next((state.fault for state in spoken if state.fault), None)
    return ServerState(runs=runs, fault=fault)


def _join_run(views: Sequence[RunView], *, everywhere: bool) -> RunView:
    newest = max(views, key=lambda view: view.latest)
    ready = set.intersection(*(set(view.ready) for view in views)) if everywhere else set()
    refused = {version: why for view in views for version, why in view.refused.items()}
    for_good = {v for view in views for v in view.refused if v not in view.retried}
    return newest.model_copy(
        update={
            "ready": sorted(ready),
            "refused": {v: why for v, why in sorted(refused.items()) if v not in ready},
            "retried": sorted(refused.keys() - for_good - ready),
            "pending": {v: why for view in views for v, why in view.pending.items()},
            "probes": _join_probes(views, ready),
            "refusal": next((view.refusal for view in views if view.refusal), None),
            "fault": next((view.fault for view in views if view.fault), None),
        }
    )


def _join_probes(views: Sequence[RunView], ready: set[int]) -> dict[int, ProbeResult]:
    """Failed if it failed for one process; else as it went where the version is ready."""
    failed = {v for view in views for v, result in view.probes.items() if result == FAILED}
    good = {v: result for v, result in views[0].probes.items() if v in ready}
    return dict(sorted({**good, **dict.fromkeys(failed, FAILED)}.items()))


def replica_status(server: ServerState, served: Served, replica_id: str) -> ReplicaStatus:
    """The answer of ``GET /bucket_lora/status``."""
    runs = {
        run_id: RunStatus(
            state=view.state,
            latest=view.latest,
            window=view.window,
            ready=view.ready,
            refused=view.refused,
            retried=view.retried,
            probes=view.probes,
            refusal=view.refusal,
            error=view.fault,
        )
        for run_id, view in sorted(server.runs.items())
    }
    return ReplicaStatus(
        replica_id=replica_id,
        base_model=served.base_model.id,
        revision=served.base_model.revision,
        architecture=served.base_model.architecture,
        dtype=served.dtype,
        max_loras=served.max_loras,
        max_lora_rank=served.max_lora_rank,
        vllm_version=served.vllm_version,
        logprobs_mode=served.logprobs_mode,
        quantization=served.quantization,
        plugin_version=served.plugin_version,
        ready=[adapter_name(run_id, v) for run_id, run in runs.items() for v in run.ready],
        runs=runs,
        error=server.fault,
    )


def adapter_status(
    name: str, server: ServerState, *, follows: Callable[[str], bool]
) -> AdapterStatus:
    """The answer about one adapter: ready, on its way, or never, with the reason."""
    state, reason = _adapter_state(name, server, follows)
    run_id, version = parse_adapter_name(name) or ("", 0)
    view = server.runs.get(run_id)
    retried = view is not None and not view.refusal and version in view.retried
    return AdapterStatus(
        name=name,
        state=state,
        reason=reason,
        retried=retried and state is ReadyState.REFUSED,
        ready_on=int(state is ReadyState.READY),
        replicas=1,
        probe=view.probes.get(version) if view else None,
    )


def version_status(run_id: str, entry: VersionEntry, server: ServerState) -> VersionStatus:
    """One line of the answer of ``GET /bucket_lora/versions``."""
    about = adapter_status(adapter_name(run_id, entry.version), server, follows=lambda _: True)
    return VersionStatus(
        **about.model_dump(),
        run_id=run_id,
        version=entry.version,
        step=entry.step,
        created_at=entry.created_at,
        rank=entry.rank,
        dtype=entry.dtype,
        weights_bytes=entry.weights.size,
    )


def _adapter_state(
    name: str, server: ServerState, follows: Callable[[str], bool]
) -> tuple[ReadyState, str | None]:
    parsed = parse_adapter_name(name)
    if parsed is None:
        return ReadyState.REFUSED, "an adapter name has the form <run id>-v<version>"
    run_id, version = parsed
    if version == 0:
        return ReadyState.REFUSED, "version 0 is the untrained policy: ask for the base model"
    if not follows(run_id):
        return ReadyState.REFUSED, f"run {run_id!r} is outside this server's --bucket-lora-runs"
    view = server.runs.get(run_id)
    if view is None:
        return ReadyState.PENDING, server.fault or f"run {run_id!r} is not in the bucket yet"
    if version in view.ready:
        return ReadyState.READY, None
    if view.refusal:
        return ReadyState.REFUSED, view.refusal
    if version in view.refused:
        return ReadyState.REFUSED, view.refused[version]
    if version > view.latest:
        why = view.fault or f"it is not published yet; the newest version is {view.latest}"
        return ReadyState.PENDING, why
    superseded = view.state != RunState.RUNNING.value and version < view.latest
    if version not in view.published or superseded:
        served = ", ".join(map(str, view.ready)) or "none"
        return ReadyState.RETIRED, f"it left the window; ready versions: {served}"
    why = view.pending.get(version) or view.fault or server.fault or "it is being loaded"
    return ReadyState.PENDING, why

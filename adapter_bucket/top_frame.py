"""One frame of ``bucket-lora top``, from what was read. Pure.

A frame is plain JSON values, so that what ``--json`` prints is what the terminal shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapter_bucket.heartbeat import Seen
from adapter_bucket.manifest import Manifest, VersionEntry
from adapter_bucket.proxy_metrics import ProxySample


def run_part(manifest: Manifest, *, now: float) -> dict[str, Any]:
    """The run and its pace, by the manifest.

    Args:
        manifest: As last read.
        now: Unix time here; the writer's clock may differ, so ages are never below 0.
    """
    entries = manifest.versions
    newest = entries[-1] if entries else None
    return {
        "run": manifest.run_id,
        "state": manifest.state.value,
        "base_model": manifest.base_model.id,
        "writer": manifest.writer.id,
        "epoch": manifest.writer.epoch,
        "latest": manifest.latest,
        "window": manifest.window,
        "kept": [entry.version for entry in entries],
        "step": newest.step if newest else None,
        "age_s": round(max(0.0, now - newest.created_at), 1) if newest else None,
        "weights_bytes": newest.weights.size if newest and newest.weights else None,
        **_pace(entries),
    }


def _pace(entries: list[VersionEntry]) -> dict[str, float | None]:
    """Versions and optimizer steps per minute, over the versions that are kept."""
    took_s = entries[-1].created_at - entries[0].created_at if len(entries) > 1 else 0.0
    if took_s <= 0:
        return {"versions_per_min": None, "steps_per_min": None}
    versions = entries[-1].version - entries[0].version
    steps = entries[-1].step - entries[0].step
    return {
        "versions_per_min": round(60 * versions / took_s, 2),
        "steps_per_min": round(60 * steps / took_s, 2),
    }


def replica_part(seen: Mapping[str, Seen], manifest: Manifest) -> list[dict[str, Any]]:
    """Each replica that writes heartbeats for the run: what it serves, and what troubles it."""
    return [_replica(name, one, manifest) for name, one in sorted(seen.items())]


def _replica(name: str, seen: Seen, manifest: Manifest) -> dict[str, Any]:
    status = seen.heartbeat.status
    run = status.runs.get(manifest.run_id)
    newest = max(run.ready, default=0) if run else 0
    trouble = [status.error] if status.error else []
    if run is not None:
        trouble += [text for text in (run.refusal, run.error) if text]
        trouble += [f"v{version}: {why}" for version, why in sorted(run.refused.items())[-1:]]
    return {
        "replica": name,
        "url": seen.heartbeat.url,
        "alive": seen.alive,
        "unchanged_s": round(seen.unchanged_s, 1),
        "ready": run.ready if run else [],
        "lag": max(0, manifest.latest - newest),
        "in_flight": status.in_flight,
        "trouble": "; ".join(trouble),
    }


def proxy_part(sample: ProxySample, before: ProxySample | None, *, run_id: str) -> dict[str, Any]:
    """The proxy's load; rates since ``before``, a sample of the same proxy, or none."""
    span_s = sample.taken_at - before.taken_at if before else 0.0

    def rate(name: str) -> float | None:
        if before is None or span_s <= 0 or sample.total(name) < before.total(name):
            return None  # a proxy that was started anew counts from 0
        return round((sample.total(name) - before.total(name)) / span_s, 2)

    prompt = sample.total("prompt_tokens_total")
    waits = sample.values.get("run_lag_versions", {})
    members = sample.by("members", "state")
    return {
        "up": int(members.get("up", 0)),
        "down": int(members.get("down", 0)),
        "requests": int(sample.total("requests_total")),
        "requests_per_s": rate("requests_total"),
        "prompt_tokens_per_s": rate("prompt_tokens_total"),
        "affinity": round(sample.total("matched_prompt_tokens_total") / prompt, 3)
        if prompt
        else None,
        "in_flight": int(sample.total("in_flight")),
        "in_flight_by_replica": {
            url: int(count) for url, count in sorted(sample.by("in_flight", "replica").items())
        },
        "outstanding_tokens": int(sample.total("outstanding_tokens")),
        "retries": int(sample.total("retries_total")),
        "adapter_waits": int(sample.total("adapter_waits_total")),
        "lag": next((int(lag) for labels, lag in waits.items() if ("run", run_id) in labels), None),
    }

"""Which runs and versions this server can serve, from what the manifest says of them. Pure.

The trainer asks the same questions before its first step; a replica asks again, because trainers
and replicas are started by different people with different flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapter_bucket.base_model import BaseModelRef, mismatch
from adapter_bucket.manifest import Manifest, VersionEntry
from adapter_bucket.servable import largest_rank, rank_remedy, servable_faults

ADAPTER_KIND = "lora"


@dataclass(frozen=True)
class Served:
    """What this server serves, as far as it decides which adapters fit."""

    base_model: BaseModelRef
    max_loras: int
    """Adapter slots of an engine."""
    max_lora_rank: int
    dtype: str
    vllm_version: str = ""
    logprobs_mode: str = ""
    quantization: str = ""
    plugin_version: str = ""


def run_fault(manifest: Manifest, served: Served) -> str | None:
    """Say why no version of the run can be served here, or ``None``."""
    return mismatch(manifest.base_model, served.base_model)


def version_fault(entry: VersionEntry, served: Served) -> str | None:
    """Say why the version cannot be served here, or ``None``. Names the value to change."""
    if entry.kind != ADAPTER_KIND:
        return f"it is a version of kind {entry.kind!r}; this server loads {ADAPTER_KIND!r} only"
    if faults := servable_faults(entry.adapter_config):
        return "vLLM cannot serve this adapter: " + "; ".join(faults)
    rank = max(entry.rank, largest_rank(entry.adapter_config))
    if rank > served.max_lora_rank:
        return (
            f"rank {rank} is above this server's --max-lora-rank {served.max_lora_rank}; "
            f"{rank_remedy(rank)}"
        )
    return None

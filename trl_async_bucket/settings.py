"""What a bucket sync needs to know, gathered from a trainer's config and checked."""

from __future__ import annotations

from dataclasses import dataclass

from adapter_bucket.ready_policy import ReadyPolicy


@dataclass(frozen=True)
class SyncSettings:
    """Settings of a ``BucketSync``; most are the config's ``bucket_*`` fields."""

    bucket_url: str
    run_id: str
    ready: ReadyPolicy
    window: int
    """Versions replicas keep ready: ``max_staleness + 2``, or 1 on-policy."""
    max_lag: int
    """Versions the newest snapshot may be ahead of the newest ready one; 0 waits for each."""
    timeout_s: float
    """Longest time for one version, from the upload to ready."""
    server_url: str | None
    """A replica, or the proxy. ``None``: nothing is asked, before the run or about readiness."""
    ready_via: str = "status"
    takeover: bool = False
    dtype: str = "auto"
    keep_every: int = 0
    base_model: str | None = None

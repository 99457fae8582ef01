"""Which versions stay. Pure: the decision is here, the deleting is in ``publish``."""

from __future__ import annotations

from collections.abc import Sequence

from adapter_bucket.manifest import VersionEntry

GRACE_VERSIONS = 1
"""Versions kept beyond the window, so that a reader of the previous manifest can still fetch."""


def split(
    entries: Sequence[VersionEntry], *, window: int, keep_every: int = 0
) -> tuple[list[VersionEntry], list[VersionEntry]]:
    """Split versions into those that stay in the manifest and those that may go.

    Args:
        entries: Ascending, the newest last.
        window: How many of the newest versions replicas keep ready.
        keep_every: Keep every version divisible by this for good; 0 keeps none.

    Returns:
        (kept, dropped), both ascending. The newest ``window + GRACE_VERSIONS`` are always kept.
    """
    recent = len(entries) - (window + GRACE_VERSIONS)
    kept: list[VersionEntry] = []
    dropped: list[VersionEntry] = []
    for index, entry in enumerate(entries):
        milestone = keep_every > 0 and entry.version % keep_every == 0
        (kept if index >= recent or milestone else dropped).append(entry)
    return kept, dropped

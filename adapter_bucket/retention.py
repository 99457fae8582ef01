"""Which versions stay. Pure: the decision is here, the deleting is in ``publish``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from adapter_bucket.manifest import VersionEntry

GRACE_VERSIONS = 1
"""Versions kept beyond the window, so that a reader of the previous manifest can still fetch."""


def split(
    entries: Sequence[VersionEntry],
    *,
    window: int,
    keep_every: int = 0,
    milestones: Collection[int] = (),
) -> tuple[list[VersionEntry], list[VersionEntry]]:
    """Split versions into those that stay in the manifest and those that may go.

    Args:
        entries: Ascending, the newest last.
        window: How many of the newest versions replicas keep ready.
        keep_every: Keep every version divisible by this for good; 0 keeps none.
        milestones: Versions to keep for good, whatever their number.

    Returns:
        (kept, dropped), both ascending. The newest ``window + GRACE_VERSIONS`` are always kept.
    """
    recent = len(entries) - (window + GRACE_VERSIONS)
    kept: list[VersionEntry] = []
    dropped: list[VersionEntry] = []
    for index, entry in enumerate(entries):
        chosen = keep_every > 0 and entry.version % keep_every == 0
        stays = index >= recent or chosen or entry.version in milestones
        (kept if stays else dropped).append(entry)
    return kept, dropped


def dead_versions(found: Collection[int], *, named: Collection[int], latest: int) -> list[int]:
    """Versions whose objects no reader can ever need, ascending.

    Objects that the manifest does not name and whose number is not above ``latest`` were dropped,
    or are orphans of a publish that died. A version number only ever goes up, so nobody can publish
    them any more: deleting them is safe at any time, also from a process that was paused between
    this decision and the deleting. Orphans above ``latest`` stay until a later version passed them.

    Args:
        found: Versions with objects in the bucket.
        named: Versions in the manifest.
        latest: ``Manifest.latest``, read *before or after* ``named``: both only grow stale safely.
    """
    return sorted(version for version in found if version <= latest and version not in named)

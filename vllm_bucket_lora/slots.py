"""Which runs get adapter slots, and which versions of a run stay ready. Pure.

An engine has ``--max-loras`` slots. A running run needs one for each version of its window and one
more, in which the next version is loaded while the old ones still serve. Ended runs get what is
left, one slot each, for their newest version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from adapter_bucket.status import slots_needed


@dataclass(frozen=True)
class Demand:
    """What one run asks for."""

    run_id: str
    running: bool
    window: int
    idle: bool = False
    """Marked running, but long without a new version: its trainer may have died."""
    newest_at: float = 0.0
    """When its newest version was published; only breaks ties among runs first seen together."""


@dataclass(frozen=True)
class Admission:
    """The answer: how many versions each run may keep ready (absent: none), and why not more."""

    keep: dict[str, int] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    """Admitted running runs, in the order of admission."""
    refused: dict[str, str] = field(default_factory=dict)
    """Runs that cannot be served while things stay as they are, with what to change."""
    unkept: dict[str, str] = field(default_factory=dict)
    """Ended runs for whose newest version no slot is left."""


def admit(demands: Iterable[Demand], slots: int, admitted: Sequence[str]) -> Admission:
    """Give the slots to runs: first come, first served.

    A run that was admitted keeps its slots as long as it publishes. One that has gone idle keeps
    them until another run needs them.

    Args:
        demands: Every known run.
        slots: ``--max-loras``.
        admitted: Running runs admitted last time, in order.
    """
    by_id = {demand.run_id: demand for demand in demands}
    rank = {run_id: place for place, run_id in enumerate(admitted)}
    running = [demand for demand in by_id.values() if demand.running]
    running.sort(
        key=lambda d: (d.idle, rank.get(d.run_id, len(rank)), -d.newest_at, d.run_id),
    )
    keep: dict[str, int] = {}
    refused: dict[str, str] = {}
    free = slots
    for demand in running:
        if slots_needed(demand.window) <= free:
            keep[demand.run_id] = demand.window
            free -= slots_needed(demand.window)
        else:
            refused[demand.run_id] = _too_few(demand, slots, [by_id[run] for run in keep])
    accepted = tuple(keep)
    unkept: dict[str, str] = {}
    ended = [demand for demand in by_id.values() if not demand.running]
    for demand in sorted(ended, key=lambda d: (-d.newest_at, d.run_id)):
        if free > 0:
            keep[demand.run_id] = 1
            free -= 1
        else:
            unkept[demand.run_id] = (
                f"the run has ended, and all {slots} slots (--max-loras) are taken by running runs "
                "or newer ones"
            )
    return Admission(keep=keep, running=accepted, refused=refused, unkept=unkept)


def retired(loaded: Iterable[int], keep: int) -> list[int]:
    """Versions of one run to retire: those with ``keep`` newer ones *loaded*, oldest first.

    A version leaves when its successor is ready, not when it is announced: if the newest versions
    turn out to be corrupt, the last good ones go on being served.
    """
    ordered = sorted(loaded)
    return ordered[: max(0, len(ordered) - keep)]


def to_load(
    published: Iterable[int], loaded: Iterable[int], keep: int, unusable: Iterable[int] = ()
) -> list[int]:
    """Versions of one run to load, newest first: a version already superseded comes last.

    Args:
        published: Versions in the manifest's window.
        loaded: Versions ready now.
        keep: How many versions the run may keep ready.
        unusable: Versions refused, gone, or not to be tried again yet.
    """
    held, skip = set(loaded), set(unusable)
    newest = sorted(set(published) - skip, reverse=True)[:keep]
    return [version for version in newest if version not in held]


def _too_few(demand: Demand, slots: int, holders: list[Demand]) -> str:
    needed = slots_needed(demand.window)
    total = needed + sum(slots_needed(holder.window) for holder in holders)
    if not holders:
        return (
            f"the run keeps {demand.window} versions ready and loads one more beside them, but "
            f"this server has --max-loras {slots}; start it with --max-loras {needed}"
        )
    names = ", ".join(sorted(repr(holder.run_id) for holder in holders))
    return (
        f"the run needs {needed} adapter slots, but {total - needed} of this server's {slots} are "
        f"held by {names}; start it with --max-loras {total}"
    )

"""What must have been given back when a run is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from adapter_bucket.layout import parse_adapter_name
from tests.faults.matrix.recorder import Record
from tests.faults.matrix.trainer import MAX_IN_FLIGHT
from tests.faults.matrix.trainers import Life
from tests.faults.matrix.world import World

GROWTH = {"descriptors": 3 * MAX_IN_FLIGHT + 6, "threads": 12}
"""What a server may have more than when it was fresh: for each rollout in flight a connection that
is kept by the trainer and one to each replica, and pool threads that come once. A run has hundreds
of completions and versions, and the servers live through many runs: a leak is far above it."""

SETTLE_S = 30.0
"""For requests in flight to end, and for versions of an ended run to be let go."""


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    pid: int
    descriptors: int
    threads: int


def usage(world: World) -> dict[str, Usage]:
    """What each server uses now."""
    used = {}
    for name, pid in world.pids().items():
        process = psutil.Process(pid)
        used[name] = Usage(pid, process.num_fds(), process.num_threads())
    return used


def check_resources(
    world: World, record: Record, lives: list[Life], before: dict[str, Usage]
) -> list[str]:
    """What was not given back; empty if all was.

    Args:
        before: By server; one that was started anew since is compared with the fresh one it
            succeeds.
    """
    problems: list[str] = []
    checks: list[tuple[str, Callable[[], str]]] = [
        ("processes of trainers", lambda: _left(lives)),
        ("requests in flight at the proxy", lambda: _in_flight(world)),
        ("requests in flight at a replica", lambda: _replica_in_flight(world)),
        ("versions of the ended run", lambda: _slots(world, record.run_id)),
        ("files in a replica's cache", lambda: _cached(world)),
        ("descriptors or threads", lambda: _grown(world, before)),
    ]
    for what, look in checks:
        if found := _settled(look):
            problems.append(f"{what}: {found}")
    out = world.disks["trainer"].path
    for staged in out.glob("*/_bucket-checkpoints/*"):
        if staged.parent.parent.name == lives[-1].name:
            problems.append(f"staged checkpoint left: {staged.name}")
    return problems


def _settled(look: Callable[[], str]) -> str:
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            found = look()
        except (OSError, psutil.Error) as error:  # a server is gone, or does not answer
            found = f"{type(error).__name__}: {error}"
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def _left(lives: list[Life]) -> str:
    return ", ".join(f"{life.name}: {life.left()}" for life in lives if life.left())


def _in_flight(world: World) -> str:
    metrics = text_string_to_metric_families(world.proxy.get("/metrics").text)
    flying = {
        sample.labels.get("replica", ""): sample.value
        for family in metrics
        for sample in family.samples
        if sample.name == "bucket_lora_proxy_in_flight" and sample.value
    }
    return str(flying) if flying else ""


def _replica_in_flight(world: World) -> str:
    for name, server in world.replicas.items():
        status = server.status()
        if status is None:
            return f"{name} does not answer"
        if status.in_flight:
            return f"{name}: {status.in_flight}"
    return ""


def _slots(world: World, run_id: str) -> str:
    """An ended run keeps its newest version only."""
    for name, server in world.replicas.items():
        status = server.status()
        ready = [] if status is None else status.ready
        mine = [a for a in ready if (p := parse_adapter_name(a)) is not None and p[0] == run_id]
        if len(mine) > 1:
            return f"{name} holds {mine}"
    return ""


def _cached(world: World) -> str:
    """One directory of the living server, and in it nothing but versions that are ready."""
    for name, server in world.replicas.items():
        status = server.status()
        sessions = list(world.disks[name].path.glob("bucket-lora-*"))
        if status is None or len(sessions) != 1:
            return f"{name}: {[s.name for s in sessions]}"
        kept = {f"{p.parent.name}/{p.name}" for p in _version_dirs(sessions[0])}
        if len(kept) > len(status.ready):
            return f"{name} keeps {sorted(kept)} for {status.ready}"
    return ""


def _version_dirs(session: Path) -> list[Path]:
    return [p for p in (session / "adapters").glob("*/*") if p.is_dir()]


def _grown(world: World, before: dict[str, Usage]) -> str:
    found = []
    for name, now in usage(world).items():
        fresh = before[name]
        for what in ("descriptors", "threads"):
            was, is_now = getattr(fresh, what), getattr(now, what)
            if is_now > was + GROWTH[what]:
                found.append(f"{name}: {was} -> {is_now} {what}")
    return ", ".join(found)

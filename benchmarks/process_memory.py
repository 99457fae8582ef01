"""Memory of process trees, by process: what nobody but it could give back.

Resident memory counts the pages of libraries and of files in the page cache, once per process that
maps them. Counted here are anonymous pages and those of shared memory (tmpfs included), shared ones
by their share (``Pss`` in Linux's ``/proc/<pid>/smaps_rollup``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

KINDS = {
    "EngineCore": "engine core",
    "Worker": "worker",
    "resource_tracker": "resource tracker",
    "spawn_main": "rollout worker",
}
"""What the command line of a child contains, and what it is then called."""

_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def tree_memory(names: Mapping[str, int]) -> dict[str, float]:
    """MiB of each process in these trees that is still there.

    Args:
        names: What the root of each tree is called, and its process id.

    Returns:
        By name: ``replica-1``, and ``replica-1 worker`` for its child.
    """
    found: dict[str, float] = {}
    for name, pid in names.items():
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                kind = "" if process == root else f" {_kind(process)}"
                found[name + kind] = found.get(name + kind, 0.0) + memory_mib(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found


def memory_mib(pid: int) -> float:
    """Anonymous and shared memory of one process, MiB.

    Raises:
        OSError: it has ended.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rows = (line.split() for line in rollup.splitlines())
    return sum(int(row[1]) for row in rows if row[0] in _COUNTED) / 1024


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((kind for part, kind in KINDS.items() if part in command), "child")

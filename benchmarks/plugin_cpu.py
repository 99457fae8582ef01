"""Who used the cores: CPU time of a server's processes, main threads apart from the others.

The kernel counts in nanoseconds for each thread how long it ran, and how long it was ready to run
while others had the cores (``/proc/<pid>/task/<tid>/schedstat``).
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

PROCESSES = {"EngineCore": "engine core", "Worker": "worker"}
"""Kinds of a server's processes by a part of their title; all others are API servers."""
SELF = "load and publisher"


@dataclass(frozen=True)
class Used:
    """Seconds since the threads began, by group: ``worker, main``, ``worker, other threads``, …"""

    ran: Counter[str]
    waited: Counter[str]
    """Ready to run, but another thread had the core."""

    def since(self, earlier: Used) -> Used:
        """What was used between two looks. Threads that ended meanwhile count for nothing."""
        ran, waited = Counter(self.ran), Counter(self.waited)
        ran.subtract(earlier.ran)
        waited.subtract(earlier.waited)
        return Used(ran, waited)


def used(server_pid: int) -> Used:
    """Look at a server, its children, and this process."""
    found = Used(Counter(), Counter())
    server = psutil.Process(server_pid)
    for process in (server, *server.children(recursive=True)):
        title = " ".join(process.cmdline())
        kind = next((kind for part, kind in PROCESSES.items() if part in title), "API server")
        _add(found, process.pid, f"{kind}, main thread", f"{kind}, other threads")
    _add(found, os.getpid(), SELF, SELF)
    return found


def _add(found: Used, pid: int, main: str, others: str) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        group = main if int(task.name) == pid else others
        try:
            ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
        except FileNotFoundError:  # a thread that has just ended
            continue
        found.ran[group] += ran_ns / 1e9  # type: ignore[assignment]  # a Counter adds floats too
        found.waited[group] += waited_ns / 1e9  # type: ignore[assignment]

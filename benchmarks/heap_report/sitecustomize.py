"""Imported by every Python process that has this folder on its path: reports on glibc's heap.

Resident memory cannot tell a leak from memory that was freed and kept by the allocator. With
``HEAP_REPORT`` naming a folder, the process writes to ``<folder>/<pid>`` every two seconds, in MiB:
what is in use, what is free and kept, and what is mapped piece by piece (also in use).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

FOLDER = "HEAP_REPORT"
PERIOD_S = 2.0


class _Mallinfo2(ctypes.Structure):
    """See ``man mallinfo``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _report() -> None:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    path = Path(os.environ[FOLDER]) / str(os.getpid())
    while True:
        info = library.mallinfo2()
        sizes = (info.uordblks, info.fordblks, info.hblkhd)
        path.write_text(" ".join(f"{size / 2**20:.1f}" for size in sizes))
        time.sleep(PERIOD_S)


def _start() -> None:
    threading.Thread(target=_report, daemon=True).start()


if FOLDER in os.environ:
    os.register_at_fork(after_in_child=_start)
    _start()

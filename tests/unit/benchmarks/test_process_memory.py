"""What the soak measures of a process: its own memory, not the files that it maps."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.process_memory import memory_mib, tree_memory

MIB = 2**20


def test_memory_that_is_used_counts_and_a_mapped_file_does_not(tmp_path: Path) -> None:
    before = memory_mib(os.getpid())
    # Pages of its own: the heap may have as many to spare, of tests that ran in this process.
    with mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(48):
            block.write(b"x" * MIB)
        assert memory_mib(os.getpid()) - before == pytest.approx(48, abs=8)
    (tmp_path / "file").write_bytes(b"x" * (48 * MIB))
    before = memory_mib(os.getpid())
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page was read
        assert memory_mib(os.getpid()) - before < 8


def test_children_have_lines_of_their_own_and_the_dead_have_none() -> None:
    """In a tree of its own: this process may have servers of other tests as children."""
    worker = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    root = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {worker!r}, 'VLLM::Worker'], check=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker_pid = int(process.stdout.readline())
        found = tree_memory({"tree": process.pid, "same": worker_pid})
        assert set(found) == {"tree", "tree worker", "same"}
        assert found["tree worker"] == pytest.approx(found["same"], abs=1)
        assert found["tree"] > 1
        assert found["same"] > 1
        process.communicate()
    assert tree_memory({"gone": worker_pid}) == {}

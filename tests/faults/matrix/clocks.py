"""A wall clock per process that the harness can move, by a small preloaded library."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """One process's clock. Give it ``environment`` when it starts; then ``move`` it."""

    def __init__(self, library: Path, file: Path) -> None:
        file.write_bytes(struct.pack("d", 0.0))
        self._file = file
        self.environment = {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(file)}

    def move(self, seconds: float) -> None:
        """Put the clock so many seconds ahead of the machine's, at once."""
        with open(os.open(self._file, os.O_WRONLY), "wb") as file:
            file.write(struct.pack("d", seconds))


def build_library(folder: Path) -> Path | None:
    """Compile the library; ``None`` where there is no C compiler.

    Raises:
        RuntimeError: the compiler refuses it.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile: {done.stderr[-1000:]}")
    return library

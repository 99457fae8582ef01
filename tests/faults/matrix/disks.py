"""A small disk for a process, which the harness can fill."""

from __future__ import annotations

import errno
import subprocess
from contextlib import suppress
from pathlib import Path

SIZE_MIB = 64


class Disk:
    """A tmpfs of its own, where this user may mount one; else a plain directory."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        self._filler = path / "filler"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(path)]
        try:
            self.can_be_full = subprocess.run(mount, capture_output=True).returncode == 0
        except FileNotFoundError:
            self.can_be_full = False

    def fill(self) -> None:
        """Leave no byte free."""
        with self._filler.open("wb", buffering=0) as file:
            for size in (2**20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)
        probe = self.path / "probe"
        try:
            probe.write_bytes(b"x")
        except OSError as error:
            if error.errno == errno.ENOSPC:
                probe.unlink(missing_ok=True)
                return
            raise
        raise RuntimeError(f"{self.path} is not full")

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if self.can_be_full:
            subprocess.run(["umount", "-l", str(self.path)], check=False)
            self.can_be_full = False

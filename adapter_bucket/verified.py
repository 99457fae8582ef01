"""Which local copies of versions are believed: hashed once per process, then watched.

A replica that restarts finds directories of an earlier process, on a disk that may have been full
or cut off. Hashing them at every load would cost seconds for large adapters, so it happens once,
and again whenever inode, size or time of a file changed.
"""

from __future__ import annotations

import threading
from pathlib import Path

from adapter_bucket.errors import IntegrityError
from adapter_bucket.manifest import FileEntry, VersionEntry
from adapter_bucket.pieces import sha256_of


def verify_file(path: Path, expected: FileEntry, key: str) -> None:
    """Check size and sha256 of a local file.

    Raises:
        IntegrityError: they are not what the manifest promised for ``key``.
    """
    size = path.stat().st_size
    if size != expected.size:
        raise IntegrityError(f"{key} has {size} bytes, the manifest says {expected.size}")
    with path.open("rb") as file:
        actual = sha256_of(file)
    if actual != expected.sha256:
        raise IntegrityError(
            f"{key} has sha256 {actual[:12]}…, the manifest says {expected.sha256[:12]}…; the "
            "version is not used"
        )


class Verified:
    """Directories whose digests this process has checked, with the state of their files then."""

    def __init__(self) -> None:
        self._states: dict[Path, tuple[object, ...]] = {}
        self._lock = threading.Lock()

    def holds(self, folder: Path, entry: VersionEntry) -> bool:
        """Whether ``folder`` has the files of ``entry``; hashes them unless nothing changed."""
        state = _state(folder, entry)
        if state is None:
            return False
        with self._lock:
            if self._states.get(folder) == state:
                return True
        try:
            for name, expected in entry.files.items():
                verify_file(folder / name, expected, str(folder / name))
        except IntegrityError:
            return False
        self.remember(folder, entry)
        return True

    def remember(self, folder: Path, entry: VersionEntry) -> None:
        """Believe ``folder`` from now on: its digests were checked."""
        state = _state(folder, entry)
        with self._lock:
            if state is not None:
                self._states[folder] = state
            for known in [known for known in self._states if not known.exists()]:
                del self._states[known]


VERIFIED = Verified()
"""Of this process."""


def _state(folder: Path, entry: VersionEntry) -> tuple[object, ...] | None:
    """Identity of the files as far as it can be had without reading; ``None`` for a wrong size."""
    found: list[object] = []
    for name, expected in sorted(entry.files.items()):
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            return None
        if status.st_size != expected.size:
            return None
        found += [status.st_ino, status.st_mtime_ns, expected.sha256]
    return tuple(found)

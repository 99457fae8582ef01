"""Verified versions on local disk, one copy for all processes of the server.

A lock per version makes the processes take turns: the second one finds what the first one fetched,
and nobody deletes a version while another process is about to use it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapter_bucket.adapter_files import adapter_faults
from adapter_bucket.fetch import fetch_version
from adapter_bucket.layout import WEIGHTS_FILE, adapter_name, version_dir
from adapter_bucket.manifest import VersionEntry
from adapter_bucket.store import Store
from vllm_bucket_lora.ports import LoadRefused


class VersionCache:
    """Directories ``<root>/adapters/<run>/v00000012``, in the form that PEFT and vLLM read."""

    def __init__(
        self,
        store: Store,
        root: Path,
    ) -> None:
        """Use ``root``, a local directory that is private to this server."""
        self._store = store
        self._versions = root / "adapters"
        self._locks = root / "locks"
        for path in (self._versions, self._locks):
            path.mkdir(parents=True, exist_ok=True)

    def fetch(self, run_id: str, entry: VersionEntry) -> Path:
        """See ``ports.Cache.fetch``."""
        with self._lock(run_id, entry.version):
            path = fetch_version(self._store, run_id, entry, self._versions)
            _check_adapter(path / WEIGHTS_FILE, entry)
        return path

    @contextmanager
    def turn(self, run_id: str, version: int) -> Iterator[Callable[[], None]]:
        """See ``ports.Cache.turn``."""

        def delete() -> None:
            shutil.rmtree(self._versions / run_id / version_dir(version), ignore_errors=True)
            (self._locks / adapter_name(run_id, version)).unlink(missing_ok=True)

        with self._lock(run_id, version):
            yield delete

    def remove(self, run_id: str, version: int) -> None:
        """Delete a version's files, which nobody needs any more."""
        with self.turn(run_id, version) as delete:
            delete()

    @contextmanager
    def _lock(self, run_id: str, version: int) -> Iterator[None]:
        path = self._locks / adapter_name(run_id, version)
        while True:
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # A lock file that was deleted while we waited for it guards nothing.
                if _same_file(fd, path):
                    yield
                    return
            finally:
                os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _check_adapter(weights: Path, entry: VersionEntry) -> None:
    """Look at every tensor: names, shapes, values that are neither NaN nor all zero.

    The digest only proves that these are the bytes that somebody published. Reading all of them
    also brings the file into the page cache, so that the engine, which reads it inside its own
    loop, does not wait for a disk.

    Raises:
        LoadRefused: vLLM would serve something else than the run's policy.
    """
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            faults = adapter_faults(
                view,
                entry.adapter_config,
                dtype=entry.dtype,
                rank=entry.rank,
                trained=entry.step > 0,
            )
        finally:
            view.release()
    if faults:
        raise LoadRefused("; ".join(faults))

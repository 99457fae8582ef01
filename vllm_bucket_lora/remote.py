"""An engine's own copies, on a machine that does not share the API server's directory.

A request names the adapter's directory on the API server's machine. A worker elsewhere takes the
run and the version from the adapter's name, and brings that version from the bucket into a
directory of its own, verified against the manifest like every other copy. A name stands for one set
of bytes, so both machines hold the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from adapter_bucket.errors import ConfigError, NotPublished
from adapter_bucket.fetch import RunReader
from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.manifest import VersionEntry
from adapter_bucket.store import Store
from vllm_bucket_lora.cache import VersionCache

_SESSION_PATH = re.compile(
    r"/bucket-lora-[^/]+/(?P<port>port-[0-9]+/)?adapters/[^/]+/v[0-9]{8}/?\Z"
)


def is_ours(path: str) -> bool:
    """Whether the directory is one that this plugin made, on whatever machine."""
    return _SESSION_PATH.search(path) is not None


def is_elsewhere(path: str, session: str) -> bool:
    """Whether the directory is a server's, but not in this machine's session.

    Without a session this process belongs to no server; ``follow`` makes directories without port.
    """
    found = _SESSION_PATH.search(path)
    if not session or found is None or found["port"] is None:
        return False
    return not path.startswith(session.rstrip("/") + "/")


class OwnCopies:
    """Versions that this machine's workers fetched by themselves. Blocks; used by one thread."""

    def __init__(self, root: Path, open_store: Callable[[], Store]) -> None:
        """Keep copies in ``root``, shared by the workers of this machine."""
        self._root = root
        self._open_store = open_store
        self._opened: tuple[Store, VersionCache] | None = None
        self._readers: dict[str, RunReader] = {}
        self._paths: dict[str, Path] = {}

    def path(self, name: str) -> Path:
        """The adapter's directory on this machine, fetched if it is not here yet.

        Raises:
            BucketError: the bucket does not answer, or has other bytes; see ``fetch_version``.
            LoadRefused: the bytes are no adapter that can be used.
        """
        if name not in self._paths:
            run_id, version = _parsed(name)
            _, cache = self._open()
            self._paths[name] = cache.fetch(run_id, self._entry(run_id, version))
        return self._paths[name]

    def forget(self, name: str) -> None:
        """Delete the copy: the adapter has left the engine."""
        if self._paths.pop(name, None) is not None:
            _, cache = self._open()
            with contextlib.suppress(OSError):
                cache.remove(*_parsed(name))

    def _open(self) -> tuple[Store, VersionCache]:
        if self._opened is None:
            store = self._open_store()
            self._opened = store, VersionCache(store, self._root)
        return self._opened

    def _entry(self, run_id: str, version: int) -> VersionEntry:
        store, _ = self._open()
        reader = self._readers.setdefault(run_id, RunReader(store, run_id))
        manifest = reader.poll() or reader.manifest
        entry = manifest.entry(version) if manifest else None
        if entry is None:
            raise NotPublished(f"version {version} of run {run_id!r} is not in the manifest")
        return entry


def _parsed(name: str) -> tuple[str, int]:
    parsed = parse_adapter_name(name)
    if parsed is None:
        raise ConfigError(f"{name!r} is no name of a published version")
    return parsed

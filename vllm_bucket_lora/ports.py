"""What the watcher needs of its surroundings: an engine, a disk, and the other server processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from adapter_bucket.manifest import VersionEntry
from adapter_bucket.probe import Probe
from vllm_bucket_lora.slots import Admission


class LoadRefused(Exception):
    """The engine will never serve this adapter. The message says why."""


class ProbeFailed(LoadRefused):
    """The engine holds the adapter, and does not compute with it as the trainer does."""


class Loader(Protocol):
    """An inference engine that serves adapters by name. Called in the event loop."""

    async def load(self, name: str, path: Path, probe: Probe | None) -> None:
        """Make the adapter servable under ``name``, if it passes its probe. Idempotent.

        Raises:
            LoadRefused: it never will be.
            ProbeFailed: the engine has it, and computes something else.
            TimeoutError: the engine did not answer; try again.
        """
        ...

    async def forget(self, name: str) -> None:
        """Stop accepting requests that name it. Those in flight go on."""
        ...

    def in_flight(self, name: str) -> int:
        """Requests of this process that are being served with it."""
        ...

    def tidy(self, name: str) -> None:
        """Drop what this process keeps for it. Called when none of its requests use it any more."""
        ...

    async def remove(self, name: str) -> None:
        """Free its slot. Called, after ``tidy``, when no process uses it any more."""
        ...


class Cache(Protocol):
    """Versions on local disk, shared by all processes of the server. Every method blocks."""

    def fetch(self, run_id: str, entry: VersionEntry) -> Path:
        """Bring a version here, verified and in page cache.

        Raises:
            BucketError: see ``adapter_bucket.fetch.fetch_version``.
            LoadRefused: the bytes are as published, but no adapter that this server can use.
            OSError: the disk is full or broken.
        """
        ...

    def turn(
        self, run_id: str, version: int
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Keep every process from fetching a version while the context lasts. Entering blocks.

        Yields what deletes the version's files.
        """
        ...


class Group(Protocol):
    """The API server processes of this server; each has a table of adapters of its own."""

    @property
    def leader(self) -> bool:
        """Whether this process decides which runs get slots. Exactly one does."""
        ...

    def leaders_admission(self) -> Admission | None:
        """What the leader decided last, or ``None`` while it has not."""
        ...

    def slept_and_woke_at(self) -> tuple[float, float]:
        """When any other process was last told that the engine sleeps, and that it is awake."""
        ...

    def held_elsewhere(self, name: str) -> bool:
        """Whether another process is loading, serving or still finishing with the adapter."""
        ...

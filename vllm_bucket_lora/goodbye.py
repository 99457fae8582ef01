"""The last word of a server whose processes were killed before they could say it themselves.

With several API servers vLLM ends them with SIGKILL, after ``--shutdown-timeout``, which is 0 by
default. So the process that writes heartbeats notes which ones there are, in the server's private
directory, and the process that started all others takes those back when it ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ValidationError

from adapter_bucket.errors import BucketError
from adapter_bucket.heartbeat import remove_heartbeat
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
"""Longest delay of the server's end: a reader notices the silence anyway, after a while."""

_NOTE = "heartbeats.json"


class Note(BaseModel):
    """Heartbeats that are in the bucket now."""

    url: str
    """The bucket."""
    replica_id: str
    runs: list[str | None]
    """``None``: the server's own."""


def note_heartbeats(directory: Path, note: Note) -> None:
    """Replace the note in a directory of this server."""
    staged = directory / f"{_NOTE}.new"
    staged.write_text(note.model_dump_json())
    staged.replace(directory / _NOTE)


class LastWord:
    """Takes back, when this process ends, the heartbeats that are noted in the server's directory.

    Its thread starts now and waits: from Python 3.12.0 on, an interpreter that ends may be unable
    to start one, and without a thread an absent bucket could hold the server's end up for minutes.
    """

    def __init__(self, session: Path, *, open_: Callable[[str], Store] = open_store) -> None:
        self._session = session
        self._open = open_
        self._ending = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._work, name="bucket-lora-goodbye", daemon=True).start()

    def say(self, limit_s: float = LIMIT_S) -> None:
        """Take them back now; return after ``limit_s`` at the latest, and log if it was cut."""
        self._ending.set()
        if not self._done.wait(limit_s):
            logger.warning(
                "heartbeats stay until they expire: the bucket took more than %.0f s", limit_s
            )

    def _work(self) -> None:
        self._ending.wait()
        try:
            for path in self._session.glob(f"*/{_NOTE}"):
                if note := _read(path):
                    self._take_back(note)
        finally:
            self._done.set()

    def _take_back(self, note: Note) -> None:
        if not note.runs:
            return
        try:
            store = self._open(note.url)
            for run_id in note.runs:
                remove_heartbeat(store, run_id, note.replica_id)
        except BucketError as error:
            logger.warning("heartbeats of %s stay until they expire: %s", note.replica_id, error)


def _read(path: Path) -> Note | None:
    try:
        return Note.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):  # killed while writing it: the heartbeats expire
        return None

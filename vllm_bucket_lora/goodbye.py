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

LIMIT_S = 5.0
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


def take_back_left(session: Path, *, open_: Callable[[str], Store] = open_store) -> None:
    """Remove the heartbeats that are noted anywhere in the server's directory. Bounded in time."""
    notes = [note for path in session.glob(f"*/{_NOTE}") if (note := _read(path)) and note.runs]

    def work() -> None:
        for note in notes:
            try:
                store = open_(note.url)
                for run_id in note.runs:
                    remove_heartbeat(store, run_id, note.replica_id)
            except BucketError as error:
                logger.warning(
                    "heartbeats of %s stay until they expire: %s", note.replica_id, error
                )

    if notes:
        thread = threading.Thread(target=work, name="bucket-lora-goodbye", daemon=True)
        thread.start()
        thread.join(LIMIT_S)


def _read(path: Path) -> Note | None:
    try:
        return Note.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):  # killed while writing it: the heartbeats expire
        return None

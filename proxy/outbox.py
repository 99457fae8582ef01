"""What is written in one turn of the loop goes out at its end, when there is much to do.

Each write wakes whoever reads it. On a machine with few cores that takes the core from this process
in the middle of its turn, and its caches with it: with eight connections and more, writing at the
end takes a tenth to a fifth of the CPU time off a request. With one connection there is nothing to
gather, and to wait for the end of the turn would only cost time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("bucket_lora_proxy")

FEW = 5
"""Generations in progress up to which each write goes out at once."""


class Outbox:
    """Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self.gathers = False
        """Whether to wait for the end of the turn."""
        self._pending: list[Callable[[], None]] = []

    def add(self, write: Callable[[], None]) -> None:
        """Have something written, now or at the end of this turn.

        Args:
            write: has to look whether its connection is still there.
        """
        if not self.gathers:
            write()
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(write)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for write in pending:
            try:
                write()
            except Exception:  # the others' are to go out all the same
                log.exception("writing to a connection failed")

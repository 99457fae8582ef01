"""Which adapter each number stands for, as all API server processes of one server know it.

An engine knows an adapter by its number alone, and takes the second adapter of a number for the
first, without a word. Numbers come from names, so two names can have one, if rarely; and the two
may be loaded by two processes. So a claim is a file that only one of them can make.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class NumberClaims:
    """Files ``<number>`` with the name of an adapter, for as long as the engine has it."""

    def __init__(self, directory: Path) -> None:
        """Use ``directory``, which the processes of this server share with nobody else."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def claim(self, number: int, name: str) -> str:
        """Claim a number, unless it is claimed. Returns the name that has it now. Idempotent."""
        while True:
            with tempfile.NamedTemporaryFile("w", dir=self._directory) as said:
                said.write(name)
                said.flush()
                try:
                    os.link(said.name, self._path(number))  # appears with its content, or not
                except FileExistsError:
                    holder = self.holder(number)
                else:
                    return name
            if holder is not None:  # else it was released just now
                return holder

    def holder(self, number: int) -> str | None:
        """The adapter that has the number, if any."""
        try:
            return self._path(number).read_text()
        except FileNotFoundError:
            return None

    def release(self, number: int) -> None:
        """Give the number back: the engine does not have the adapter any more."""
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / str(number)

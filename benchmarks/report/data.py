"""The JSON files of ``benchmarks/results``, as the report reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """One file: where and how it was measured, and its rows."""

    environment: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def digest(self) -> str:
        """Of the rows: a plot that was drawn from them carries it."""
        return hashlib.sha256(json.dumps(self.rows, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def source(self) -> str:
        """The command, and when it ran."""
        about = self.environment
        load = about["load before"]
        return f"`{about['command']}` (commit {about['commit']}, load {load} before)"


class Results:
    """All files of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Result] = {}
        for path in sorted(folder.glob("*.json")):
            document = json.loads(path.read_text())
            self._files[path.stem] = Result(document["environment"], document["rows"])

    def __getitem__(self, name: str) -> Result:
        return self._files[name]

    def __iter__(self) -> Iterator[Result]:
        return iter(self._files.values())


@dataclass(frozen=True)
class Goal:
    """A goal, held against rows."""

    text: str
    missed: Sequence[str]
    """The rows that miss it, and by how much."""
    rows: int
    why: str = ""
    """Said if there are such rows."""

    def __str__(self) -> str:
        held = self.rows - len(self.missed)
        if not self.missed:
            return f"**Goal: {self.text}.** Holds in all {self.rows} rows."
        said = f"Holds in {held} of {self.rows} rows. Missed: {'; '.join(self.missed)}."
        return f"**Goal: {self.text}.** {said} {self.why}".rstrip()


def span(values: Sequence[float], unit: str = "") -> str:
    """The least and the largest value."""
    low, high = shown(min(values)), shown(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def shown(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.2g}" if abs(value) < 10 else f"{value:,.0f}"

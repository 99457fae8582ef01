"""What a person sees while the demo runs: prefixed log lines above a progress bar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

_COLOURS = {"replica-1": "cyan", "replica-2": "magenta", "proxy": "blue", "trainer": "green"}

# Complete output is in the log files; of it only these lines tell what the run is doing.
_SHOWN = re.compile(
    r"bucket|adapter|\bready\b|Error|error|Traceback|WARNING|refused|listening|"
    r"Application startup complete",
)
_HIDDEN = re.compile(
    r"GET |POST |Route|rollout_buffer|FutureWarning|UserWarning|deprecated|version \d+ ready|"
    r"\{'loss'|--bucket-lora|non-default args"
)
_WIDTH = 150


class Display:
    """Thread-safe: log lines arrive from one thread per process."""

    def __init__(self, steps: int) -> None:
        self.console = Console()
        self._progress = Progress(
            TextColumn("[bold green]training"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
        )
        self._task = self._progress.add_task("training", total=steps, figures="", start=False)
        self._printed_step = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def line(self, name: str, text: str) -> None:
        """Show a line of a process if it tells something."""
        if _SHOWN.search(text) and not _HIDDEN.search(text):
            self.note(name, text)

    def note(self, name: str, text: str) -> None:
        """Show a line with its prefix."""
        line = Text(f"{name:>9} │ ", style=_COLOURS.get(name, "yellow"))
        line.append(text[:_WIDTH], style="default")
        self.console.print(line, highlight=False, soft_wrap=True)

    def start_training(self) -> None:
        """Start the clock of the bar."""
        self._progress.start_task(self._task)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the newest step."""
        if row.get("reward") is None:  # the trainer's closing row
            return
        step = int(row["step"])
        figures = f"reward {row['reward']:.2f}"
        if row.get("bucket/version") is not None:
            figures += (
                f"  version {row['bucket/version']:.0f}  lag {row['bucket/lag']:.0f}"
                f"  blocked {1000 * row['perf/weight_sync_s']:.1f} ms"
            )
        self._progress.update(self._task, completed=step, figures=figures)
        if not self.console.is_terminal and step >= self._printed_step + 10:
            self._printed_step = step
            self.note("trainer", f"step {step}: {figures}")

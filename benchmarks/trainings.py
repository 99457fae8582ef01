"""Whole trainings of the demo's policy, one after another, beside one server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.fleet import Server, start_trainer
from demo.observe import read_metrics
from demo.processes import Processes

WARM_UP_STEPS = 5
"""Of a training, which figures leave out."""


class Trainings:
    """Trains once and again.

    Args:
        processes: Starts the trainers.
        model: The base model's folder.
        out: Gets a folder for each training.
        steps: Of each training.
        timeout_s: Longest training.
    """

    def __init__(
        self, processes: Processes, model: Path, out: Path, steps: int, *, timeout_s: float
    ) -> None:
        self._processes, self._model, self._out = processes, model, out
        self._steps, self._timeout_s = steps, timeout_s

    def train(
        self, server: Server, name: str, *extra: str, env: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """What one trainer logged.

        Raises:
            RuntimeError: it failed or took too long, or the server ended; names the log.
        """
        folder = self._out / name
        trainer = start_trainer(
            self._processes, self._model, server.url, folder, "--steps", str(self._steps), *extra,
            name=name, env=env,
        )  # fmt: skip
        self._processes.wait_until(
            f"{name} to end",
            lambda: trainer.process.poll() is not None,
            timeout_s=self._timeout_s,
            watch=[server.child],
        )
        if trainer.process.returncode != 0:
            raise RuntimeError(f"{name} failed; its log is {trainer.log_path}")
        return read_metrics(folder / "metrics.jsonl")

"""Starts trainer processes over a folder as a bucket, and reads what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.fencing import read_manifest
from adapter_bucket.file_store import FileStore
from adapter_bucket.manifest import Manifest
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store

ROOT = Path(__file__).parents[3]
RUN = "run"
MODULE = "tests.integration.preemption.trainer"


class Trainer:
    """A trainer process; its JSON lines are events, the rest is its log."""

    def __init__(self, *arguments: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", MODULE, *arguments],
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.events: list[dict[str, Any]] = []
        self.signalled = 0.0

    def until(self, key: str, value: Any = None) -> dict[str, Any]:
        """Read events until one has ``key`` (with ``value``, or a greater number)."""
        for event in self._read():
            if key in event and (value is None or event[key] >= value):
                return event
        raise AssertionError(f"the trainer ended before {key!r}\n{self.tail()}")

    def go_on(self) -> None:
        """Let a trainer that was started ``--step-by-step`` begin its next life."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def term(self) -> None:
        """Send SIGTERM."""
        self.signalled = time.monotonic()
        self.process.send_signal(signal.SIGTERM)

    def end(self, timeout_s: float = 60) -> tuple[int, float]:
        """(exit code, seconds since SIGTERM)."""
        for _ in self._read():
            pass
        code = self.process.wait(timeout_s)
        self.close()
        return code, time.monotonic() - self.signalled

    def close(self) -> None:
        """End it if it still runs, and let go of its pipes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the life that it forked
            self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def of(self, key: str) -> list[dict[str, Any]]:
        """The events that have ``key``."""
        return [event for event in self.events if key in event]

    def tail(self) -> str:
        """End of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                try:
                    event = json.loads(line)
                except ValueError:  # transformers prints its logs as Python dicts
                    continue
                self.events.append(event)
                yield event


class Bench:
    """A bucket, and trainers that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: Store = FileStore.open((folder / "bucket").as_uri())
        self._trainers: list[Trainer] = []

    def start(
        self,
        name: str,
        *arguments: str,
        resume: str | None = "bucket",
        env: dict[str, str] | None = None,
    ) -> Trainer:
        """Start a trainer on a machine of its own."""
        made = Trainer(
            "--bucket", self.store.url, "--out", str(self.folder / name), "--run-id", RUN,
            *(("--resume", resume) if resume else ()), *arguments,
            log=self.folder / f"{name}.log", env=env,
        )  # fmt: skip
        self._trainers.append(made)
        return made

    def manifest(self) -> Manifest:
        """The run's manifest."""
        found = read_manifest(self.store, RUN, SigningKeys())
        assert found is not None
        return found.manifest

    def close(self) -> None:
        """End what still runs."""
        for trainer in self._trainers:
            trainer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An empty bucket."""
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()

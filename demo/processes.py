"""Starts the demo's processes, prefixes their output, and stops every one of them.

Each child is the leader of its own process group, so that what it spawned (vLLM's engine, TRL's
rollout worker) goes with it. Ends processes by pid only.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TERM_WAIT_S = 15.0
"""How long a process may take to end after SIGTERM before it is killed."""

_PORTS = (20_000, 32_000)
"""Below what Linux (from 32768), macOS and Windows (from 49152) give to outgoing connections."""

_given: set[int] = set()
"""By this process: their servers may not have bound them yet."""


@dataclass
class Child:
    """A started process and where its output goes."""

    name: str
    process: subprocess.Popen[str]
    log_path: Path
    on_line: Callable[[str, str], None]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End the whole group at once, as a lost machine would."""
        _signal_group(self.pid, signal.SIGKILL)
        self.process.wait()


class Processes:
    """The children of one run. Use as a context manager: leaving it stops them all."""

    def __init__(self, log_dir: Path, on_line: Callable[[str, str], None]) -> None:
        self._log_dir = log_dir
        self._on_line = on_line
        self._children: list[Child] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start a process; every line it prints goes to its log file and to ``on_line``."""
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        child = Child(name, process, self._log_dir / f"{name}.log", self._on_line)
        assert process.stdout is not None
        threading.Thread(
            target=_pump, args=(child, process.stdout), name=f"log-{name}", daemon=True
        ).start()
        self._children.append(child)
        return child

    def wait_until(
        self, what: str, is_true: Callable[[], bool], *, timeout_s: float, watch: Sequence[Child]
    ) -> None:
        """Wait for a condition while the watched children live.

        Raises:
            RuntimeError: a watched child ended first, or time ran out; names its log file.
        """
        deadline = time.monotonic() + timeout_s
        while not is_true():
            for child in watch:
                if child.process.poll() is not None:
                    raise RuntimeError(
                        f"{child.name} ended with code {child.process.returncode} while waiting "
                        f"for {what}; its log is {child.log_path}"
                    )
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} took longer than {timeout_s:.0f} s")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop all children: SIGTERM, a grace time shared by all, then SIGKILL."""
        alive = [child for child in self._children if child.process.poll() is None]
        for child in alive:
            _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + TERM_WAIT_S
        for child in alive:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(deadline - time.monotonic(), 0.1))
            # Also after a clean end: what the child left behind in its group.
            child.kill()
        self._children.clear()


def free_port(*, pair_offset: int = 0) -> int:
    """A TCP port on the loopback address that was free a moment ago, and so ``+ pair_offset``.

    A server binds it seconds or minutes later. So it is none of those that the system gives to
    outgoing connections, and chosen at random, since other processes look for one, too.
    """
    while True:
        port = random.randrange(*_PORTS)
        wanted = {port, port + pair_offset}
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            if pair_offset:
                second.bind(("127.0.0.1", port + pair_offset))
            if not wanted & _given:
                _given.update(wanted)
                return port


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the whole group has ended already
        os.killpg(pid, number)


def _pump(child: Child, stream: IO[str]) -> None:
    with stream, child.log_path.open("a") as log:
        for line in stream:
            log.write(line)
            log.flush()
            child.on_line(child.name, line.rstrip())

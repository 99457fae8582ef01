"""The trainers of a run: started as a scheduler of spot machines would, each on a fresh disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from demo.processes import Child, Processes

START_S = 240.0


@dataclass
class Life:
    """One start of a trainer: a process group that a machine's loss ends as one."""

    name: str
    pid: int
    log: Path
    out: Path
    code: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def signal(self, number: int) -> None:
        """To the trainer and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it as a lost machine would."""
        self.signal(signal.SIGKILL)
        if not self.ended.wait(20):
            raise RuntimeError(f"trainer {self.name} survived SIGKILL")

    def left(self) -> list[str]:
        """Processes that are still in its group."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.status() != "zombie":
                    found.append(" ".join(process.cmdline())[-80:])
        return found


class Trainers:
    """The process that all trainers are forked from, and what it started."""

    def __init__(self, processes: Processes, log_dir: Path, env: Mapping[str, str]) -> None:
        self._log_dir = log_dir
        self._lives: list[Life] = []
        self._started: dict[int, Life] = {}
        self._changed = threading.Condition()
        self._new_pid: int | None = None
        self._ready = threading.Event()
        self._connection = socket.socket()
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(START_S)
        command = [
            sys.executable, "-m", "tests.faults.matrix.zygote", str(server.getsockname()[1]),
        ]  # fmt: skip
        self.child: Child = processes.start("trainers", command, env=env)
        self._server = server

    def wait(self) -> None:
        """Wait until it has imported everything."""
        with self._server, self._connection:
            self._connection, _ = self._server.accept()
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._ready.wait(START_S):
            raise RuntimeError(f"no trainers can be started; see {self.child.log_path}")

    def start(self, name: str, out: Path, *arguments: str) -> Life:
        """Start a trainer with an empty output directory."""
        for old in out.parent.glob("*"):
            if not any(life.out == old and not life.ended.is_set() for life in self._lives):
                shutil.rmtree(old, ignore_errors=True)  # that machine is gone, with its disk
        log = self._log_dir / f"{name}.log"
        order = {
            "arguments": ["--life", name, "--out", str(out), *arguments],
            "log": str(log),
        }
        with self._changed:
            self._new_pid = None
            self._connection.sendall(json.dumps(order).encode() + b"\n")
            if not self._changed.wait_for(lambda: self._new_pid is not None, timeout=20):
                raise RuntimeError(f"trainer {name} was not started; see {self.child.log_path}")
            assert self._new_pid is not None
            life = Life(name, self._new_pid, log, out)
            self._lives.append(life)
            self._started[life.pid] = life
            self._changed.notify_all()
        return life

    def close(self) -> None:
        """Kill every trainer that lives, and close the connection."""
        for life in self._lives:
            if not life.ended.is_set():
                life.signal(signal.SIGCONT)
                life.kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with self._connection.makefile("r") as lines:
            for line in lines:
                said = json.loads(line)
                if "ready" in said:
                    self._ready.set()
                elif "started" in said:
                    with self._changed:
                        self._new_pid = said["started"]
                        self._changed.notify_all()
                else:
                    self._note_end(said["ended"], said["code"])

    def _note_end(self, pid: int, code: int) -> None:
        with self._changed:
            # Its start may not have been noted yet, if it ended at once.
            self._changed.wait_for(lambda: pid in self._started, timeout=5)
            life = self._started.pop(pid, None)
        if life is not None:
            life.code = code
            life.ended.set()

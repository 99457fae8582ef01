"""Starts trainers from a process that has imported everything: imports are most of a start.

``python -m tests.faults.matrix.zygote PORT`` connects to PORT and reads a line of JSON per trainer:
arguments and log file. Each is a forked process and the leader of a group of its own, as
is everything it starts. Its pid and its end are told back. When the connection ends, so do they.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

TICK_S = 0.1


def main() -> int:
    """Serve until the connection ends; a trainer returns its own exit code."""
    import_everything()
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    say(connection, ready=True)
    running: set[int] = set()
    buffered = b""
    try:
        while True:
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                running.discard(ended[0])
                code = os.waitstatus_to_exitcode(ended[1])
                say(connection, ended=ended[0], code=code)
            if not select.select([connection], [], [], TICK_S)[0]:
                continue
            received = connection.recv(65536)
            if not received:
                return 0
            *lines, buffered = (buffered + received).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    running.clear()
                    connection.close()
                    return train(order)
                running.add(pid)
                say(connection, started=pid)
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def train(order: dict[str, Any]) -> int:
    """Be a trainer. Errors leave by the interpreter's usual way."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.faults.matrix.nursery import open_nursery
    from tests.faults.matrix.trainer import main as train_main

    open_nursery()
    train_main(order["arguments"])
    return 0


def import_everything() -> None:
    """What a trainer imports."""
    import torch

    torch.set_num_threads(1)
    from importlib import import_module

    for name in (
        "datasets", "peft", "transformers", "trl.experimental.async_grpo", "trl_async_bucket",
        "demo.cpu_trl", "demo.task", "demo.train",
    ):  # fmt: skip
        import_module(name)


def say(connection: socket.socket, **facts: Any) -> None:
    """One line."""
    connection.sendall(json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())

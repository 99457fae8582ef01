"""Lets TRL's rollout worker be forked from a process that has imported everything.

TRL spawns it, and its imports take longer than all else in a start. What runs is TRL's own; it only
begins as ``multiprocessing``'s fork server begins processes, from a copy of this one that was made
before the first thread.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing import connection, forkserver
from types import SimpleNamespace
from typing import Any


def open_nursery() -> None:
    """Fork the server. While the process has one thread and has used no torch."""
    from trl.experimental.async_grpo import async_rollout_worker

    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        alive_reader, alive_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_writer)
            try:
                forkserver.main(listener.fileno(), alive_reader, [])
            finally:
                os._exit(0)
        os.close(alive_reader)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_writer
    server._forkserver_pid = pid
    async_rollout_worker.mp = SimpleNamespace(
        get_context=lambda _method: multiprocessing.get_context("forkserver")
    )

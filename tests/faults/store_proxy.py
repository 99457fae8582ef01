"""A TCP proxy between a client and a store that fails on command.

It forwards bytes and knows nothing of HTTP, except that ``answer`` writes an answer of its own
and closes, and that "100 Continue" is passed on.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

_CHUNK = 65536


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Counts are for one connection; ``None`` is off."""

    latency_s: float = 0.0
    """Before the first byte of an answer."""
    stall_after: int | None = None
    """Answer bytes after which nothing more arrives, and nothing is closed."""
    reset_after: int | None = None
    """Answer bytes after which the connection is reset; 0 loses the answer alone."""
    close_after: int | None = None
    """Answer bytes after which the connection is closed in good order: a truncated body."""
    flip_at: int | None = None
    """Answer byte that is changed on the way."""
    answer: str | None = None
    """S3 error code to answer with, without asking the store."""
    limit: int | None = None
    """How many connections fail; afterwards all is well."""


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and forwards to ``target`` (host, port)."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._faults = Faults()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.requests = 0
        """Connections seen while a fault was on."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        port = self._server.getsockname()[1]
        return f"http://127.0.0.1:{port}"

    @contextmanager
    def failing(self, faults: Faults) -> Iterator[None]:
        """Fail inside the block. Idle connections are cut, so that the fault is met at once."""
        self.requests = 0
        self._set(faults)
        try:
            yield
        finally:
            self._set(Faults())

    def close(self) -> None:
        self._server.close()
        self._cut()

    def _set(self, faults: Faults) -> None:
        with self._lock:
            self._faults = faults
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _take(self) -> Faults:
        with self._lock:
            faults = self._faults
            if faults != Faults():
                self.requests += 1
            if faults.limit is not None:
                left = faults.limit - 1
                self._faults = replace(faults, limit=left) if left else Faults()
            return faults

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client, self._take()), daemon=True).start()

    def _serve(self, client: socket.socket, faults: Faults) -> None:
        if faults.answer is not None:
            self._answer(client, faults.answer)
            return
        store = socket.create_connection(self._target)
        with self._lock:
            self._open |= {client, store}
        upward = threading.Thread(target=self._up, args=(client, store), daemon=True)
        upward.start()
        with suppress(OSError):
            self._down(store, client, faults)
        for one in (client, store):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        upward.join()
        with self._lock:
            self._open -= {client, store}
        client.close()
        store.close()

    def _answer(self, client: socket.socket, code: str) -> None:
        status = 503 if code == "SlowDown" else 400
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with client, suppress(OSError):
            client.settimeout(5)
            client.recv(_CHUNK)
            client.sendall((head + body).encode())

    def _up(self, client: socket.socket, store: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(_CHUNK):
                store.sendall(data)
        with suppress(OSError):
            store.shutdown(socket.SHUT_WR)

    def _down(self, store: socket.socket, client: socket.socket, faults: Faults) -> None:
        sent = 0
        while data := store.recv(_CHUNK):
            if sent == 0 and data.startswith(b"HTTP/1.1 100"):
                client.sendall(data)  # "100 Continue" is no answer yet
                continue
            if sent == 0 and faults.latency_s:
                time.sleep(faults.latency_s)
            if faults.flip_at is not None and sent <= faults.flip_at < sent + len(data):
                at = faults.flip_at - sent
                data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            for limit, end in (
                (faults.stall_after, self._stall),
                (faults.reset_after, self._reset),
                (faults.close_after, None),
            ):
                if limit is not None and sent + len(data) > limit:
                    client.sendall(data[: limit - sent])
                    if end is not None:
                        end(client)
                    return
            client.sendall(data)
            sent += len(data)

    def _stall(self, client: socket.socket) -> None:
        while True:  # until the client gives up, or the test cuts the connection
            time.sleep(0.05)
            client.settimeout(0.05)
            with suppress(TimeoutError):
                if not client.recv(1, socket.MSG_PEEK):
                    return

    def _reset(self, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

"""A client that sends any bytes, and never waits for ever."""

from __future__ import annotations

import re
import socket
import time

ANSWER_S = 5.0
"""A proxy that neither answers nor closes within this time hangs."""


class Raw:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self.sent = 0
        self.got = b""
        self.ended = False

    def write(self, data: bytes) -> None:
        """Send; a peer that has closed is no error."""
        try:
            self._socket.sendall(data)
        except OSError:
            return
        self.sent += len(data)

    def read(self, *, quiet_s: float = ANSWER_S) -> bytes:
        """All that comes until the peer closes or is silent for ``quiet_s``."""
        self._socket.settimeout(quiet_s)
        try:
            while piece := self._socket.recv(1 << 20):
                self.got += piece
        except TimeoutError:
            return self.got
        except OSError:
            pass
        self.ended = True
        return self.got

    def read_until(self, marker: bytes) -> bool:
        """Read no further than the piece in which the marker ends. Returns whether it came."""
        self._socket.settimeout(ANSWER_S)
        while marker not in self.got:
            try:
                piece = self._socket.recv(65536)
            except OSError:
                return False
            if not piece:
                return False
            self.got += piece
        return True

    def settled(self, within_s: float) -> bool:
        """Whether the peer answers (with more than an interim status) or closes in time."""
        deadline = time.monotonic() + within_s
        while not self.ended and not any(s >= 200 for s in statuses(self.read(quiet_s=0.3))):
            if time.monotonic() > deadline:
                return False
        return True

    def closed(self, within_s: float = ANSWER_S) -> bool:
        """Whether the peer closes."""
        deadline = time.monotonic() + within_s
        self._socket.settimeout(within_s)
        try:
            while piece := self._socket.recv(1 << 20):
                self.got += piece
                if time.monotonic() > deadline:
                    return False
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def exchange(
        self, method: str, path: str, *fields: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """One request on a connection of its own. Returns status (0: closed without) and body."""
        lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *fields]
        if body or method not in ("GET", "HEAD"):
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        self.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        assert self.closed(30), f"{method} {path} hangs"
        self.close()
        head, _, rest = self.got.partition(b"\r\n\r\n")
        found = statuses(head)
        return (found[0] if found else 0), rest


def statuses(got: bytes) -> list[int]:
    """Status of every answer in these bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", got)]

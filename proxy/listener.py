"""Accepts clients: all that wait, in one turn of the loop.

uvloop's own server takes one connection in a turn. Under load a turn takes tens of milliseconds, so
the last of 128 clients that connected together waited for 0.8 s, and of 384 for 1.7 s.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger("bucket_lora_proxy")

MAX_ACCEPTS = 256
"""Connections taken in one turn, so that a flood of them does not stop everything else."""

PAUSE_S = 0.5
"""How long none is taken after the system refused one, e.g. for want of file descriptors."""


class Listener:
    """A listening socket; has what uvicorn asks of an ``asyncio.Server``.

    Args:
        listening: bound and listening; closed by ``close``.
        make_protocol: called for each connection.
        tls: context, for TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        listening.setblocking(False)
        self.sockets = (listening,)
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self.sockets[0], self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                client, _ = self.sockets[0].accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept a connection, trying again in %g s: %s", PAUSE_S, error)
                self._loop.remove_reader(self.sockets[0])
                self._pause = self._loop.call_later(PAUSE_S, self._listen)
                return
            task = self._loop.create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, client, ssl=self._tls)
        except OSError as error:  # ssl.SSLError is one: the client's handshake failed
            log.debug("a client's connection could not be opened: %s", error)
            client.close()

    def close(self) -> None:
        """Take no more connections."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self.sockets[0])
        for task in self._opening:
            task.cancel()
        self.sockets[0].close()

    async def wait_closed(self) -> None:
        """Wait until nothing is being opened any more."""
        await asyncio.gather(*self._opening, return_exceptions=True)

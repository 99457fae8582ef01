"""A TCP link with a round-trip time and a bandwidth, in front of a server on loopback.

For benchmarks that need a far bucket on one machine. It delays bytes and nothing else: whatever is
spoken over it passes unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

CHUNK_BYTES = 64 * 1024


class SlowLink:
    """Listens on a loopback port and forwards to another, late. A context manager.

    ``rtt_s`` and ``bytes_per_s`` may be changed at any time and count from the next chunk on.

    Args:
        host: Where the real server listens.
        port: Its port.
        rtt_s: Round-trip time, seconds: half of it is added in each direction.
        bytes_per_s: Bandwidth of each direction of each connection; ``None``: unlimited.
    """

    def __init__(
        self, host: str, port: int, *, rtt_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        self._target = (host, port)
        self.rtt_s = rtt_s
        self.bytes_per_s = bytes_per_s
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="slow-link", daemon=True
        )
        self._listening = threading.Event()

    def __enter__(self) -> SlowLink:
        self._thread.start()
        if not self._listening.wait(10):
            raise RuntimeError("the slow link could not listen on a loopback port")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._connection, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stop.wait()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.rtt_s)  # the handshake
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        both = (self._carry(reader, far_writer), self._carry(far_reader, writer))
        with contextlib.suppress(asyncio.CancelledError):  # the link is taken down
            await asyncio.gather(*both, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction. Chunks overlap on the way, as on a real link; order is kept."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(due - loop.time(), 0))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        sent = asyncio.ensure_future(deliver())
        busy_until = 0.0
        try:
            while data := await reader.read(CHUNK_BYTES):
                now = loop.time()
                if self.bytes_per_s is not None:
                    busy_until = max(busy_until, now) + len(data) / self.bytes_per_s
                await queue.put((max(busy_until, now) + self.rtt_s / 2, data))
            await queue.put((loop.time() + self.rtt_s / 2, b""))
            await sent
        except asyncio.CancelledError:  # the link is taken down: drop what is on its way
            sent.cancel()
            writer.close()

"""When a fault begins: at an event inside a phase, which is held until the fault is there.

Nothing is left to chance: the link (or the trainer's hook) that sees the event waits before it lets
it go on. A request is held with half of its body passed on.
"""

from __future__ import annotations

import asyncio
import threading

from tests.faults.matrix.links import HttpLink, Request

MET_S = 90.0
"""Every phase comes by every few seconds, also on a busy machine."""
HELD_S = 45.0
"""An event is never held for longer, so that a failure of the harness cannot hang a process."""

VICTIM = "replica-1"
"""The replica that faults of a replica hit, and whose loads and generations are the phases."""


def phase_of(link: str, request: Request) -> str | None:
    """Which phase a request belongs to, seen on the link of this name."""
    path = request.path.partition("?")[0]
    if link == "trainer-store" and request.method == "PUT":
        if "/adapters/" in path and path.endswith(".safetensors"):
            return "publish"
        if "/checkpoints/" in path and not path.endswith(".json"):
            return "checkpoint"
    if link == f"{VICTIM}-store" and request.method == "GET" and path.endswith(".safetensors"):
        return "load"
    if link == f"proxy-{VICTIM}" and path == "/v1/completions":
        return "generation"
    return None


class Moments:
    """Where processes wait for the harness, and the harness for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase: str | None = None
        self._met = threading.Event()
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def arm(self, phase: str) -> None:
        """Hold the next event of this phase."""
        with self._lock:
            self._phase, self._gate = phase, None
            self._met.clear()

    def wait(self) -> None:
        """Wait until an event is held.

        Raises:
            RuntimeError: none came.
        """
        if not self._met.wait(MET_S):
            raise RuntimeError(f"phase {self._phase!r} did not come by within {MET_S:.0f} s")

    def release(self) -> None:
        """Let the held event go on."""
        with self._lock:
            gate, self._gate, self._phase = self._gate, None, None
        if gate is not None:
            loop, event = gate
            loop.call_soon_threadsafe(event.set)

    async def reached(self, phase: str | None) -> None:
        """An event of the phase: returns at once, unless it is the one waited for."""
        with self._lock:
            if phase is None or self._phase != phase or self._met.is_set():
                return
            event = asyncio.Event()
            self._gate = (asyncio.get_running_loop(), event)
            self._met.set()
        try:
            await asyncio.wait_for(event.wait(), HELD_S)
        except TimeoutError:
            return
        # If the fault killed the sender, its connection's end must be seen before more is sent.
        await asyncio.sleep(0.05)

    async def passing(self, link: HttpLink, request: Request) -> None:
        """See ``links.Observer``."""
        await self.reached(phase_of(link.name, request))

"""Where the trainers of a run report to: one TCP connection each, a line of JSON per event.

An event with ``ask`` holds the trainer until it is answered; so the harness can begin a fault
inside a snapshot, keep a second trainer before its claim, and end a run after a step.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from tests.faults.matrix.links import Network
from tests.faults.matrix.moments import Moments
from tests.faults.matrix.recorder import Record, trained

GO_ON = "go on"
SLOWLY = "slowly"
FINISH = "finish"


class Hub:
    """Listens for trainers. ``record`` gets what they say."""

    def __init__(self, network: Network, moments: Moments) -> None:
        self._network = network
        self._moments = moments
        self._gates: dict[str, asyncio.Event] = {}
        self.record: Record | None = None
        self.finishing = False
        """Whether trainers are to end the run after the step they are in."""
        self.slowly = False
        """Whether trainers are to leave the cores to others between their steps."""
        self.port: int = network.run(network.listen(self._serve))

    def keep(self, life: str) -> None:
        """Let this trainer wait before it trains, until ``let_go``."""
        self._gates[life] = asyncio.Event()

    def let_go(self, life: str) -> None:
        """Let it train."""
        self._network.loop.call_soon_threadsafe(self._gates[life].set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while line := await reader.readline():
                event = json.loads(line)
                ask = event.pop("ask", False)
                answer = await self._take(event)
                if ask:
                    writer.write(answer.encode() + b"\n")
                    await writer.drain()
        writer.close()

    async def _take(self, event: dict[str, Any]) -> str:
        event["at"] = time.time()
        record = self.record
        if record is not None and event["run"] == record.run_id:
            if "ids" in event:
                record.trained.append(trained(event))
            else:
                record.events.append(event)
        if "snapshot" in event:
            await self._moments.reached("snapshot")
        if "before_training" in event and event["life"] in self._gates:
            await self._gates[event["life"]].wait()
        if "step" not in event:
            return GO_ON
        return FINISH if self.finishing else SLOWLY if self.slowly else GO_ON

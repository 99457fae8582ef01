"""What the API server processes of one server tell each other, through files in its directory.

With data parallelism vLLM starts several API servers on one port, each with its own table of
adapters, and any of them may get the next request. So a version is ready only if it is ready in all
of them. Each process writes its state to a file of its own; each reads the others'.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from adapter_bucket.status import ProbeResult
from vllm_bucket_lora.slots import Admission

logger = logging.getLogger(__name__)

TICK_S = 0.02
"""How often a process looks whether another one's file changed. A stat in memory: microseconds."""


class RunView(BaseModel):
    """One run as one process sees it."""

    model_config = ConfigDict(frozen=True)

    state: str
    """As in ``adapter_bucket.status.RunStatus``."""
    latest: int
    window: int
    published: list[int] = []
    """Versions in the window of the manifest last read, ascending."""
    ready: list[int] = []
    refused: dict[int, str] = {}
    retried: list[int] = []
    """Those refused that are still tried, ascending."""
    pending: dict[int, str] = {}
    """Versions that failed and will be tried again, with the reason."""
    probes: dict[int, ProbeResult] = {}
    """Of ready versions, and of those refused for theirs."""
    refusal: str | None = None
    """Why nothing of the run is served."""
    fault: str | None = None
    """What is wrong with reading the run, or why an ended one is not kept."""


class ServerState(BaseModel):
    """What one API server process knows and holds."""

    model_config = ConfigDict(frozen=True)

    runs: dict[str, RunView] = {}
    holds: list[str] = []
    """Adapters whose slot or files it uses, whatever their phase."""
    admission: Admission | None = None
    """Which runs get slots; only the leader's counts."""
    fault: str | None = None
    slept_at: float = 0.0
    """When it was last told that the engine goes to sleep, seconds of this machine's monotonic
    clock, which all processes share; 0: never."""
    woke_at: float = 0.0
    """When it was last told that the engine is awake again."""


class ServerGroup:
    """This process among the API servers of one server."""

    def __init__(self, directory: Path, *, rank: int, count: int) -> None:
        """Join the group.

        Args:
            directory: Shared by the processes of this server, and by nothing else.
            rank: This process, 0…count - 1.
            count: How many API server processes vLLM starts.
        """
        self._directory = directory / "servers"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._others = [other for other in range(count) if other != rank]
        self._seen: dict[str, tuple[int, int]] = {}
        self._own = self._written = ServerState()

    @property
    def leader(self) -> bool:
        """Rank 0 decides."""
        return self._rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is the only API server process."""
        return not self._others

    def publish(self, state: ServerState) -> None:
        """Replace this process's state, atomically.

        Raises:
            OSError: the others cannot see it, as the disk is full; the next call writes again.
        """
        self._own = state
        if self.alone or state == self._written:
            return
        path = self._state_file(self._rank)
        staged = path.with_suffix(".new")
        staged.write_text(state.model_dump_json())
        os.replace(staged, path)
        self._written = state

    def states(self) -> list[ServerState | None]:
        """State of every process, this one first; ``None`` for one that has not said anything."""
        return [self._own, *(self._read(other) for other in self._others)]

    def leaders_admission(self) -> Admission | None:
        """See ``ports.Group.leaders_admission``."""
        state = self._own if self.leader else self._read(0)
        return state.admission if state else None

    def slept_and_woke_at(self) -> tuple[float, float]:
        """See ``ports.Group.slept_and_woke_at``."""
        states = [state for state in map(self._read, self._others) if state is not None]
        return (
            max((state.slept_at for state in states), default=0.0),
            max((state.woke_at for state in states), default=0.0),
        )

    def held_elsewhere(self, name: str) -> bool:
        """See ``ports.Group.held_elsewhere``. Never from memory: an old answer deletes too much."""
        states = [self._read(other) for other in self._others]
        return any(state is not None and name in state.holds for state in states)

    def wake_others(self) -> None:
        """Ask the other processes to look at the bucket at once."""
        if not self.alone:
            (self._directory / f"wake-{self._rank}").write_text("")

    def poll(self, on_wake: Callable[[], None], on_change: Callable[[], None]) -> None:
        """Report what others did since the last call: asked to look, or changed their state."""
        for other in self._others:
            if self._touched(f"wake-{other}"):
                on_wake()
            if self._touched(self._state_file(other).name):
                on_change()

    def _state_file(self, rank: int) -> Path:
        return self._directory / f"{rank}.json"

    def _touched(self, name: str) -> bool:
        try:
            stat = (self._directory / name).stat()
        except FileNotFoundError:
            return False
        mark = (stat.st_mtime_ns, stat.st_ino)
        changed = self._seen.get(name) != mark
        self._seen[name] = mark
        return changed

    def _read(self, rank: int) -> ServerState | None:
        try:
            return ServerState.model_validate_json(self._state_file(rank).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            logger.exception("the state of API server %d cannot be read", rank)
            return None

"""What the matrix is made of: faults, whom they hit, and in which phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("snapshot", "publish", "load", "generation", "checkpoint")

WORKER_DIED = "RuntimeError: Rollout worker child has failed"
OVERTAKEN = "StoreUnavailable: run '"
"""Of the second trainer: the first one saved once more while the second waited to begin. It has
fenced the first one then, and has to be started again."""
"""TRL's own words when its rollout worker has used up its attempts, or met an error of its own."""

TORCH_CANNOT_WRITE = "RuntimeError: [enforce fail at inline_container.cc"
"""How ``torch.save`` says that the disk is full."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault. One training run meets it in each of its phases."""

    name: str
    target: str
    """Whom it hits."""
    what: str
    """For the table."""
    phases: tuple[str, ...] = PHASES
    stops: tuple[str, ...] = ()
    """Errors that may stop the trainer: class name, or ``class: beginning of the text``. Any other
    error fails the cell, and with none given the trainer may not stop by itself."""
    must_stop: bool = False
    """Going on as if nothing had happened would be wrong."""

    @property
    def key(self) -> str:
        """How it is chosen on the command line."""
        return f"{self.name}/{self.target}"


@dataclass(frozen=True)
class Cell:
    """One fault in one phase."""

    fault: Fault
    phase: str

    @property
    def key(self) -> str:
        return f"{self.fault.key}:{self.phase}"


FAULTS = (
    Fault("kill", "trainer", "kill -9", must_stop=True),
    Fault("kill", "replica", "kill -9, started again at once"),
    Fault("kill", "proxy", "kill -9, started again after 1 s"),
    Fault("kill", "store", "kill -9, started again after 3 s"),
    Fault("stop", "trainer", "SIGSTOP for 30 s"),
    Fault("stop", "replica", "SIGSTOP for 30 s"),
    Fault("stop", "proxy", "SIGSTOP for 30 s", ("load", "generation")),
    Fault("stop", "store", "SIGSTOP for 30 s", ("publish", "load", "checkpoint")),
    Fault("cut", "trainer-store", "no packet passes for 12 s, then connections are reset"),
    Fault("cut", "replica-store", "the same", ("publish", "load")),
    Fault("cut", "trainer-proxy", "the same", ("load", "generation")),
    Fault("cut", "proxy-replica", "the same", ("load", "generation")),
    Fault("latency", "store", "500 ms more for every answer of the bucket, for 10 s"),
    Fault("503", "store", "the bucket answers everybody 503 SlowDown for 10 s"),
    Fault("read-only", "store", "the bucket refuses every write (403 AccessDenied) for 8 s",
          stops=("StoreDenied",)),
    Fault("corrupt", "store", "a byte of the newest object is flipped in the bucket"),
    Fault("clock", "trainer", "its clock is one hour ahead for 10 s", stops=("StoreDenied",)),
    Fault("clock", "replica", "its clock is one hour ahead for 10 s", ("load", "generation")),
    Fault("disk", "machine", "no byte is free for 8 s on the disk of trainer, or of replica",
          stops=("OSError", "SafetensorError", TORCH_CANNOT_WRITE)),
    Fault("certificate", "proxy", "it expires, 15 s later there is a new one"),
    Fault("token", "proxy", "the old one is refused at once; the trainer gets the new one when it "
          "is started again", stops=(WORKER_DIED, "ConfigError"), must_stop=True),
    Fault("token-overlap", "proxy", "both are accepted for a while", ("generation",)),
    Fault("second-trainer", "run", "another one resumes the same run",
          stops=("FencedError", OVERTAKEN), must_stop=True),
    Fault("second-trainer-refused", "run", "another one starts the same run without resuming it",
          ("publish",)),
)  # fmt: skip
"""Which process a fault hits is part of the cell. ``disk`` hits the trainer's disk in the phases
that are the trainer's, and the disk of a replica's cache in the others."""

CI = (
    "kill/trainer:publish",
    "corrupt/store:publish",
    "cut/trainer-store:snapshot",
    "503/store:checkpoint",
)
"""One run of the test suite meets these, one after the other."""


def all_cells() -> list[Cell]:
    """Every cell, by fault."""
    return [Cell(fault, phase) for fault in FAULTS for phase in fault.phases]


def choose(text: str) -> list[Cell]:
    """Cells from ``kill/trainer:publish,kill/replica,stop``: a part of a key means all below it.

    Raises:
        ValueError: a word fits no cell.
    """
    if text == "all":
        return all_cells()
    chosen: list[Cell] = []
    for word in text.split(","):
        fitting = [cell for cell in all_cells() if word in _names(cell)]
        if not fitting:
            raise ValueError(f"{word!r} names no cell; known are {[c.key for c in all_cells()]}")
        chosen += [cell for cell in fitting if cell not in chosen]
    return chosen


def _names(cell: Cell) -> tuple[str, ...]:
    fault = cell.fault
    return cell.key, fault.key, fault.name, f"{fault.name}:{cell.phase}"


def may_stop(fault: Fault, error: str) -> bool:
    """Whether ``Class: text`` is an error that this fault may stop the trainer with."""
    return any(
        error.startswith(allowed) if ":" in allowed else error.partition(":")[0] == allowed
        for allowed in fault.stops
    )

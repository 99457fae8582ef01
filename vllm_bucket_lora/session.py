"""A server's private directory for adapters, shared by its processes and removed when they end.

Every process of the server holds a shared lock on the directory. One that nobody holds was left by
a server that was killed; the next server to start removes it, because the default place is memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from adapter_bucket.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "bucket-lora-"
_LOCK = "lock"


@dataclass(frozen=True)
class Session:
    """The directory, and the descriptor whose lock says that this process uses it."""

    path: Path
    lock_fd: int


LAST_WAIT_S = 3.0
"""How long the process that made the directory waits at its end for those it started."""

_joined: dict[Path, Session] = {}
"""Directories whose lock this process holds."""


def default_base() -> Path:
    """Where sessions go: memory if the machine offers it, because engines read from there."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def create_session(base: Path | None) -> Session:
    """Make a new directory in ``base``, and remove those that killed servers left there.

    Raises:
        ConfigError: ``base`` cannot be written.
    """
    base = base or default_base()
    try:
        base.mkdir(parents=True, exist_ok=True)
        sweep(base)
        # mkdtemp makes it readable by this user only: adapters are the product of a training run.
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)).resolve()
        return join_session(path)
    except OSError as error:
        raise ConfigError(
            f"--bucket-lora-cache-dir: cannot write adapters to {base}: {error}"
        ) from error


def join_session(path: Path) -> Session:
    """Hold the directory's lock from this process until it ends. Idempotent."""
    if path in _joined:  # a second descriptor would keep this process from being the last one
        return _joined[path]
    fd = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    session = _joined[path] = Session(path, fd)
    return session


def remove_session(session: Session) -> None:
    """Give the directory up, and delete it if no other process uses it, or all are just ending."""
    deadline = time.monotonic() + LAST_WAIT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(session.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
            continue
        shutil.rmtree(session.path, ignore_errors=True)
        break
    os.close(session.lock_fd)
    _joined.pop(session.path, None)


def sweep(base: Path) -> None:
    """Remove the directories of servers that are gone."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # No lock file yet: its server is between the two steps of creating it.
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                logger.info("removed %s, left by a server that is gone", path)
            finally:
                os.close(fd)

"""Kills the process it is in, at a chosen point, and forks one life after the other to die there.

Knows no trainer. What a process does is said in lines of JSON on stdout, of which the last before
its end is as sure to arrive as any.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adapter_bucket import file_store
from adapter_bucket.layout import WEIGHTS_FILE, parse_manifest_key
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from trl_async_bucket import sync
from trl_async_bucket.snapshot import SnapshotBuffer

ARMED = threading.Event()
"""Set once a life has said where it began: a test counts those."""


def say(**facts: Any) -> None:
    """One line for the test, whatever happens next."""
    os.write(1, json.dumps(facts).encode() + b"\n")


class KillPoint:
    """``<n>:<pattern>``: the n-th event that matches kills this process."""

    def __init__(self, text: str) -> None:
        count, _, pattern = text.partition(":")
        self._left = int(count)
        self._pattern = re.compile(pattern)

    def __call__(self, event: str) -> None:
        if ARMED.is_set() and self._pattern.search(event):
            self._left -= 1
            if self._left == 0:
                say(died=event)
                os.kill(os.getpid(), signal.SIGKILL)


class Told:
    """Passes calls on to a store; tells each write before and after, and says what it committed."""

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        self._store = store
        self._tell = tell
        self._latest: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("create", "replace", "upload", "delete"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            targets = args[0] if name == "delete" else [args[0]]
            for target in targets:
                self._tell(f"before {name} {target}")
                commits = name in ("create", "replace") and parse_manifest_key(target)
                newer = bool(commits) and self._about_to_commit(args[1])
                first = [target] if name == "delete" else target
                result = found(first, *args[1:], **options)
                if commits:
                    _say_commit("committed", args[1])
                self._tell(f"after {name} {target}")
                if newer:
                    self._tell("after the commit of a version")
            return result if name != "delete" else None

        return call

    def _about_to_commit(self, manifest: bytes) -> bool:
        """Whether this manifest has a newer version, and not only a checkpoint, say."""
        # Said now, too: another thread may kill this process right after the write.
        latest = _say_commit("committing", manifest)
        newer = self._latest is not None and latest > self._latest
        self._latest = latest
        if newer:
            self._tell("before the commit of a version")
        return newer


def _say_commit(what: str, data: bytes) -> int:
    manifest = json.loads(bytes(data))
    digests = {
        entry["version"]: entry["files"][WEIGHTS_FILE]["sha256"] for entry in manifest["versions"]
    }
    latest: int = manifest["latest"]
    say(**{what: digests}, latest=latest, at=time.time())
    return latest


def watch_store(tell: Callable[[str], None]) -> None:
    """Tell every write of this process, before and after."""
    setattr(sync, "open_store", lambda url: Told(open_store(url), tell))  # noqa: B010


def install(kill: Callable[[str], None]) -> None:
    """Put the kill points into this process."""
    watch_store(kill)
    fill, stage = SnapshotBuffer.fill, file_store._staged

    def killing_fill(self: SnapshotBuffer, tensors: Any) -> None:
        fill(self, tensors)
        kill("snapshot")

    def killing_stage(path: Path, data: Any) -> Any:
        staged = stage(path, data)
        kill(f"within {path}")  # its bytes are in the bucket's folder, its name is not
        return staged

    setattr(SnapshotBuffer, "fill", killing_fill)  # noqa: B010
    setattr(file_store, "_staged", killing_stage)  # noqa: B010


def live(points: Sequence[str], train: Callable[[int], None], *, step_by_step: bool) -> None:
    """Fork one life after the other: each dies at its point, and a last one comes through.

    Args:
        points: See ``KillPoint``.
        train: Told the number of its life, from 0.
        step_by_step: Wait for a line on stdin before each life.
    """
    for number, point in enumerate([*points, "0:never"]):
        if step_by_step and not sys.stdin.readline():
            return  # the test has ended
        code = in_child(partial(_live, point, train, number))
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"life {number} failed")  # its traceback stands above
        say(life=number, code=code)


def _live(point: str, train: Callable[[int], None], number: int) -> None:
    install(KillPoint(point))
    train(number)


def in_child(do: Callable[[], None]) -> int:
    """Do something in a forked process; its exit code."""
    child = os.fork()
    if child == 0:
        try:
            do()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

"""Runs several clients of one bucket in lockstep, one store call at a time, in a chosen order.

Each client is a thread that stops before and after every store call. Whoever steers releases one of
them, waits until it stops again, and looks at the bucket in between. So a schedule is a list of
numbers, and the same list gives the same history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from enum import StrEnum
from typing import Any, Literal

from hypothesis import strategies as st

from adapter_bucket.errors import NotPublished, StoreUnavailable
from adapter_bucket.lifecycle import collect
from adapter_bucket.memory_store import MemoryStore


class Fate(StrEnum):
    """What happens to the call a client stands before, or to the answer it waits for."""

    GO = "go"
    LOSE = "lose"
    """The request never arrives, or the answer is lost."""
    CRASH = "crash"
    """The client dies here."""


fates = st.sampled_from([Fate.GO] * 17 + [Fate.LOSE, Fate.LOSE, Fate.CRASH])
"""Mostly nothing happens."""


def collector(run_id: str) -> Callable[[MemoryStore], None]:
    """A client that collects the run's garbage twice, however new it is."""

    def body(store: MemoryStore) -> None:
        for _ in range(2):
            with suppress(NotPublished, StoreUnavailable):
                collect(store, run_id, older_than_s=-5)

    return body


class Crash(BaseException):
    """Ends a client's thread; nothing in the code under test catches it."""


class Inline(Executor):
    """Runs deletions in the writer's own thread, so that they are part of the schedule."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Client:
    """One client and the gate it stops at."""

    def __init__(self, base: MemoryStore, body: Callable[[MemoryStore], None]) -> None:
        self._condition = threading.Condition()
        self._fate: Fate | None = None
        self._waiting = False
        self.finished = False
        self.fault: BaseException | None = None
        self._body = body
        self._store = base.view(self._gate)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._settle()

    def step(self, fate: Fate) -> None:
        """Let the client go on to its next stop."""
        with self._condition:
            self._fate, self._waiting = fate, False
            self._condition.notify_all()
        self._settle()

    def _settle(self) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._waiting or self.finished, timeout=30)

    def _gate(self, phase: Literal["before", "after"], name: str, key: str) -> None:
        with self._condition:
            self._waiting = True
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._fate is not None, timeout=30)
            fate, self._fate = self._fate, None
        if fate is Fate.CRASH:
            raise Crash
        if fate is Fate.LOSE:
            raise StoreUnavailable(f"{phase} {name} {key}: lost on purpose")

    def _run(self) -> None:
        try:
            self._body(self._store)
        except Crash:
            pass
        except BaseException as error:
            self.fault = error
        finally:
            with self._condition:
                self.finished = True
                self._condition.notify_all()

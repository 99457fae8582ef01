"""A real process that publishes and kills itself before or after its n-th write.

``python crashing_publisher.py <bucket url> <run id> <step>`` imports everything once, then forks a
child per crash point: the first child dies at point 0, the next at point <step>, …, until one comes
through alive. Every child takes the run over from the dead one and says where it dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.stores import open_store
from tests.adapters import BASE, version

NEVER = 10_000
"""A crash point that no life reaches."""


class Crashing:
    """Passes calls on to a store, and kills the process before or after one of its writes."""

    def __init__(self, store: Any, point: int, report: int) -> None:
        self._store = store
        self._left = point
        self._report = report
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("create", "replace", "overwrite", "delete"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if name == "delete":  # one key at a time, as the stores do
                for key in args[0]:
                    self._wrap(partial(found, [key]), name, key)
                return None
            return self._wrap(partial(found, *args, **options), name, args[0])

        return call

    def _wrap(self, call: Callable[[], Any], name: str, key: str) -> Any:
        self._count(f"before {name} {key}")
        result = call()
        self._count(f"after {name} {key}")
        return result

    def _count(self, where: str) -> None:
        with self._lock:
            if self._left == 0:
                os.write(self._report, json.dumps({"died": where}).encode() + b"\n")
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def publish(url: str, run_id: str, point: int) -> None:
    store: Any = Crashing(open_store(url), point, sys.stdout.fileno())
    writer = RunWriter.claim(
        store, run_id, base_model=BASE, window=1, writer_id=f"life {point}", takeover=True
    )
    # Other bytes in every life: a number used twice would be seen by the readers.
    number = writer.next_version
    writer.publish(number, **version(1000 * point + number))
    writer.close(RunState.FINISHED)


def main() -> None:
    url, run_id, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    point, seeds = 0, 2
    while True:
        if point >= 2 and seeds:  # a history, so that the following publish deletes a version
            publish(url, run_id, NEVER + seeds)
            seeds -= 1
            continue
        child = os.fork()
        if child == 0:
            try:
                publish(url, run_id, point)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            print(json.dumps({"came_through": point}), flush=True)
            return
        if code != -signal.SIGKILL:
            raise SystemExit(f"life {point} failed")  # its traceback stands above
        point += step


if __name__ == "__main__":
    main()

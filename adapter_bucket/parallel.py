"""Parts of one transfer, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_parallel(call: Callable[[int], T], starts: range, parallel: int) -> list[T]:
    """Run ``call`` for every start; in this thread if there is only one."""
    if len(starts) == 1:
        return [call(starts[0])]

    def results() -> Iterator[T]:
        with ThreadPoolExecutor(min(parallel, len(starts)), "s3-part") as pool:
            futures = [pool.submit(call, start) for start in starts]
            try:
                for future in futures:
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

    return list(results())

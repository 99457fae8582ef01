"""Calls on the bucket or the disk, beside the event loop; what is said of one without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

SILENT_S = 120.0
"""Longest call of the bucket of which nothing is said. S3's end earlier, those of a folder never if
its mount hangs, and nothing else would tell that no version comes."""

T = TypeVar("T")


async def beside(executor: Executor, call: Callable[[], T], tell: Callable[[str], None]) -> T:
    """Run a blocking call in ``executor``, for as long as it takes.

    Args:
        executor: Where it blocks.
        call: What to run.
        tell: Is told a fault, once, if the call takes longer than ``SILENT_S``.

    Raises:
        Exception: whatever the call raises.
    """
    asked = asyncio.get_running_loop().run_in_executor(executor, call)
    if not (await asyncio.wait([asked], timeout=SILENT_S))[0]:
        tell(f"StoreUnavailable: no answer for {SILENT_S:.0f} s; a mount may hang")
    return await asked

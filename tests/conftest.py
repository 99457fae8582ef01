"""Which tests share a process (`make test` starts two): those that share servers.

xdist's own groups, by a mark, end in the test's id, which pytest 9.2 no longer takes.
"""

from __future__ import annotations

import signal
from pathlib import PurePosixPath
from typing import Any

import pytest

SHARE_SERVERS = (
    "tests/contract",
    "tests/integration/loop",
    "tests/integration/parallel",
    "tests/integration/plugin",
    "tests/integration/trainers",
)
"""Folders whose files use the same servers or libraries. Any other file is a group of its own."""


def pytest_configure() -> None:
    """Let processes that tests start take a Ctrl-C, also where a shell runs all in the background.

    Such a shell has its commands ignore SIGINT, which every child inherits.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let nothing slow begin last."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole groups to processes, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.partition("::")[0])
            folder = str(path.parent)
            return folder if folder in SHARE_SERVERS else str(path)

    config.option.loadscopereorder = False
    return ByServers(config, log)

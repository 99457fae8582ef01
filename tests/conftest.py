"""Which tests share a process, because they share servers; slow ones go first."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SHARE_SERVERS = (
    "contract",
    "integration/loop",
    "integration/parallel",
    "integration/plugin",
    "integration/trainers",
)
"""Folders whose files use the same servers or libraries. Any other file is a group of its own."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name each test's group, which one process runs, and let nothing slow begin last."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path.relative_to(TESTS))))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # stable


def _group(path: Path) -> str:
    folder = path.parent.as_posix()
    return folder if folder in SHARE_SERVERS else path.as_posix()

"""What a file of figures says about the machine and the tree they were taken on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import environment


def test_a_machine_without_git_names_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["commit"] is None

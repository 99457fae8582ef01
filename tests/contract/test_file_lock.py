"""Exclusion on a file system, against processes that die or sleep at the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter_bucket import file_lock
from adapter_bucket.errors import PreconditionFailed, StoreUnavailable
from adapter_bucket.file_lock import FileLock
from adapter_bucket.file_store import FileStore
from adapter_bucket.store import StoredObject

KEY = "runs/r/manifest.json"

HOLDER = """
import hashlib, sys
from pathlib import Path
from adapter_bucket.errors import PreconditionFailed
from adapter_bucket.file_lock import FileLock

path, before = Path(sys.argv[1]), sys.argv[2].encode()

def check(path):
    if path.read_bytes() != before:
        raise PreconditionFailed("changed")
    print("checked", flush=True)
    sys.stdin.readline()

try:
    with FileLock.stage(path, b"late") as lock:
        lock.commit_exclusively(check)
    print("committed", flush=True)
except PreconditionFailed:
    print("refused", flush=True)
"""


@contextmanager
def holder(path: Path, before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, has checked, and waits for a line before it commits."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(path), before],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "checked\n"
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore.open(tmp_path.as_uri())


def test_a_writer_killed_with_the_lock_is_outlived(store: FileStore, tmp_path: Path) -> None:
    etag = store.create(KEY, b"one")
    with holder(tmp_path / KEY, "one") as process:
        process.kill()
        process.wait()
        store.replace(KEY, b"two", etag=etag)
    assert (tmp_path / KEY).read_bytes() == b"two"


def test_a_writer_paused_between_check_and_commit_cannot_commit_late(
    store: FileStore, tmp_path: Path
) -> None:
    etag = store.create(KEY, b"one")
    with holder(tmp_path / KEY, "one") as process:
        os.kill(process.pid, signal.SIGSTOP)
        store.replace(KEY, b"two", etag=etag)
        os.kill(process.pid, signal.SIGCONT)
        # It lost the lock, so it takes it again, checks again, and is refused.
        assert answer(process) == "refused"
    assert (tmp_path / KEY).read_bytes() == b"two"


def test_breaking_the_lock_of_a_live_writer_costs_it_only_a_second_check(
    store: FileStore, tmp_path: Path
) -> None:
    store.create(KEY, b"one")
    with holder(tmp_path / KEY, "one") as process:
        with pytest.raises(PreconditionFailed):
            store.create(KEY, b"other")
        assert answer(process) == "checked"
        assert answer(process) == "committed"
    assert (tmp_path / KEY).read_bytes() == b"late"


def test_nothing_is_left_behind_by_writes(store: FileStore, tmp_path: Path) -> None:
    etag = store.create(KEY, b"one")
    store.replace(KEY, b"two", etag=etag)
    with pytest.raises(PreconditionFailed):
        store.create(KEY, b"three")
    assert [path.name for path in (tmp_path / "runs/r").iterdir()] == ["manifest.json"]


def test_leftovers_of_a_killed_writer_are_unseen_and_swept(
    store: FileStore, tmp_path: Path
) -> None:
    FileLock.stage(tmp_path / KEY, b"never committed")
    assert list(store.list("runs/")) == []
    assert list(store.list_dirs("runs/r/")) == []
    assert store.sweep("runs/", older_than_s=3600) == 0
    time.sleep(0.02)
    assert store.sweep("runs/", older_than_s=0) == 1
    assert list((tmp_path / "runs/r").iterdir()) == []


def test_an_empty_lock_left_after_a_commit_is_no_obstacle(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "runs/r/manifest.json.lock").mkdir(parents=True)
    store.create(KEY, b"one")
    assert isinstance(store.get(KEY), StoredObject)


def test_a_lock_that_never_gets_free_is_given_up(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "WAIT_S", 0.2)
    lock = tmp_path / "runs/r/manifest.json.lock"
    lock.mkdir(parents=True)
    (lock / "somebody").write_bytes(b"x")
    with pytest.raises(StoreUnavailable, match="busy"):
        store.create(KEY, b"one")


def test_a_staged_write_that_was_swept_away_is_reported(tmp_path: Path) -> None:
    def vanish(path: Path) -> None:
        for folder in path.parent.iterdir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    check: Callable[[Path], None] = vanish
    with (
        FileLock.stage(tmp_path / "key", b"x") as lock,
        pytest.raises(StoreUnavailable, match="lost"),
    ):
        lock.commit_exclusively(check)

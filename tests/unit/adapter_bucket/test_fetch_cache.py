"""The local copy of a version: what is believed, what is fetched again, what is cleaned up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from adapter_bucket import verified
from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.fetch import STALE_STAGE_S, fetch_version
from adapter_bucket.layout import CONFIG_FILE, WEIGHTS_FILE
from adapter_bucket.manifest import VersionEntry
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from tests.adapters import BASE, adapter_file, version


@pytest.fixture
def downloads() -> list[str]:
    return []


@pytest.fixture
def store(downloads: list[str]) -> MemoryStore:
    def hook(phase: str, name: str, key: str) -> None:
        if (phase, name) == ("before", "download"):
            downloads.append(key)

    return MemoryStore(hook=hook)


@pytest.fixture
def entry(store: MemoryStore) -> VersionEntry:
    writer = RunWriter.claim(store, "r", base_model=BASE, window=2, writer_id="w")
    return writer.publish(1, **version(1))


def test_a_second_fetch_reads_nothing(
    store: MemoryStore, entry: VersionEntry, tmp_path: Path, downloads: list[str]
) -> None:
    first = fetch_version(store, "r", entry, tmp_path)
    assert fetch_version(store, "r", entry, tmp_path) == first
    assert len(downloads) == 1


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_copy_is_replaced(
    store: MemoryStore, entry: VersionEntry, tmp_path: Path, name: str, damage: str
) -> None:
    file = fetch_version(store, "r", entry, tmp_path) / name
    good = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(good[:-1] if damage == "cut" else good[:-1] + bytes([good[-1] ^ 1]))
        os.utime(file, ns=(1, 1))
    assert fetch_version(store, "r", entry, tmp_path)
    assert file.read_bytes() == good
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["v00000001"]


def test_a_copy_of_an_earlier_process_is_hashed_once(
    store: MemoryStore,
    entry: VersionEntry,
    tmp_path: Path,
    downloads: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = fetch_version(store, "r", entry, tmp_path)
    monkeypatch.setattr("adapter_bucket.fetch.VERIFIED", verified.Verified())  # a restart
    assert fetch_version(store, "r", entry, tmp_path) == folder
    assert len(downloads) == 1
    # Same size and no trace in the times: only the digest tells.
    data = bytearray(adapter_file(1))
    data[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(data)
    monkeypatch.setattr("adapter_bucket.fetch.VERIFIED", verified.Verified())
    fetch_version(store, "r", entry, tmp_path)
    assert len(downloads) == 2
    assert (folder / WEIGHTS_FILE).read_bytes() == adapter_file(1)


def test_stages_of_killed_processes_are_removed_and_live_ones_are_not(
    store: MemoryStore, entry: VersionEntry, tmp_path: Path
) -> None:
    old, live = tmp_path / "r" / ".v00000009.dead", tmp_path / "r" / ".v00000009.live"
    old.mkdir(parents=True)
    live.mkdir()
    os.utime(old, (0, time.time() - STALE_STAGE_S - 1))
    fetch_version(store, "r", entry, tmp_path)
    assert not old.exists()
    assert live.exists()


def test_a_cache_that_cannot_be_written_is_said_so(store: MemoryStore, entry: VersionEntry) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be kept in /proc/none"):
        fetch_version(store, "r", entry, Path("/proc/none"))

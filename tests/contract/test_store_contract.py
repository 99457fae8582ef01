"""What every store promises (``adapter_bucket.store``): memory, a folder, real S3 servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapter_bucket.errors import IntegrityError, ObjectNotFound, PreconditionFailed
from adapter_bucket.store import NotModified, Payload, Store, StoredObject

KEY = "runs/r/manifest.json"


def read(store: Store, key: str = KEY) -> bytes:
    found = store.get(key)
    assert isinstance(found, StoredObject)
    return found.data


def test_create_is_read_back_with_its_etag(store: Store) -> None:
    etag = store.create(KEY, b"one")
    assert store.get(KEY) == StoredObject(b"one", etag)


@pytest.mark.parametrize("data", [b"x", bytearray(b"xy"), memoryview(bytes(range(256)))[3:250]])
def test_every_kind_of_payload_arrives_byte_for_byte(store: Store, data: Payload) -> None:
    store.create(KEY, data)
    assert read(store) == bytes(data)


def test_create_never_overwrites(store: Store) -> None:
    store.create(KEY, b"one")
    with pytest.raises(PreconditionFailed):
        store.create(KEY, b"two")
    assert read(store) == b"one"


def test_replace_needs_the_current_etag(store: Store) -> None:
    first = store.create(KEY, b"one")
    second = store.replace(KEY, b"two", etag=first)
    assert second != first
    with pytest.raises(PreconditionFailed):
        store.replace(KEY, b"three", etag=first)
    assert store.get(KEY) == StoredObject(b"two", second)


def test_replace_of_a_missing_object_is_a_lost_precondition(store: Store) -> None:
    etag = store.create(KEY, b"one")
    store.delete([KEY])
    with pytest.raises(PreconditionFailed):
        store.replace(KEY, b"two", etag=etag)
    with pytest.raises(ObjectNotFound):
        store.get(KEY)


def test_overwrite_writes_whatever_is_there(store: Store) -> None:
    store.overwrite(KEY, b"one")
    store.overwrite(KEY, b"two")
    assert read(store) == b"two"


def test_an_unchanged_object_is_not_modified(store: Store) -> None:
    etag = store.create(KEY, b"one")
    assert isinstance(store.get(KEY, if_none_match=etag), NotModified)
    changed = store.replace(KEY, b"two", etag=etag)
    assert store.get(KEY, if_none_match=etag) == StoredObject(b"two", changed)


def test_a_missing_object_is_not_found_even_with_a_condition(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match=KEY):
        store.get(KEY)
    with pytest.raises(ObjectNotFound, match=KEY):
        store.get(KEY, if_none_match='"0123456789abcdef0123456789abcdef"')


def test_an_object_above_the_limit_is_refused(store: Store) -> None:
    store.create(KEY, b"x" * 1000)
    assert len(store.get(KEY, max_bytes=1000).data) == 1000  # type: ignore[union-attr]
    with pytest.raises(IntegrityError, match="999"):
        store.get(KEY, max_bytes=999)


def test_download_writes_exactly_the_object(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    store.create("runs/r/adapters/v00000001/adapter_model.safetensors", data)
    target = tmp_path / "file"
    store.download("runs/r/adapters/v00000001/adapter_model.safetensors", target, size=len(data))
    assert target.read_bytes() == data


@pytest.mark.parametrize("size", [2, 4])
def test_download_of_another_size_is_refused(store: Store, tmp_path: Path, size: int) -> None:
    store.create(KEY, b"abc")
    with pytest.raises(IntegrityError, match="3"):
        store.download(KEY, tmp_path / "file", size=size)


def test_download_of_a_missing_object_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound):
        store.download(KEY, tmp_path / "file", size=3)


def test_an_error_to_write_the_local_file_is_the_local_disks(store: Store, tmp_path: Path) -> None:
    store.create(KEY, b"abc")
    with pytest.raises(FileNotFoundError):
        store.download(KEY, tmp_path / "missing" / "file", size=3)


def test_listing_sees_keys_sizes_and_directories(store: Store) -> None:
    for name in ("a/1", "a/2", "b/c/3"):
        store.create(f"runs/{name}", b"xyz")
    assert sorted(store.list("runs/a/")) == ["runs/a/1", "runs/a/2"]
    assert sorted(store.list_dirs("runs/")) == ["a", "b"]
    assert list(store.list_dirs("nothing/")) == []
    infos = list(store.scan("runs/b/"))
    assert [(info.key, info.size) for info in infos] == [("runs/b/c/3", 3)]


def test_a_prefix_is_not_a_sibling_with_the_same_beginning(store: Store) -> None:
    store.create("runs/r/x", b"1")
    store.create("runs/r2/x", b"1")
    assert list(store.list("runs/r/")) == ["runs/r/x"]


def test_objects_are_as_old_as_the_stores_clock_says(store: Store) -> None:
    store.create(KEY, b"one")
    (info,) = store.scan("runs/")
    assert abs(store.now() - info.modified_at) < 10
    assert abs(store.now() - time.time()) < 60


def test_delete_is_idempotent(store: Store) -> None:
    store.create(KEY, b"one")
    store.delete([KEY, "runs/r/never-was"])
    store.delete([KEY])
    with pytest.raises(ObjectNotFound):
        store.get(KEY)
    store.create(KEY, b"again")


def test_sweep_leaves_objects_alone(store: Store) -> None:
    store.create(KEY, b"one")
    assert store.sweep("runs/", older_than_s=0.0) == 0
    assert read(store) == b"one"


def test_one_of_many_creators_wins(reopen: Callable[[], Store]) -> None:
    def attempt(number: int) -> bytes | None:
        data = b"writer %d " % number * 100
        try:
            reopen().create(KEY, data)
        except PreconditionFailed:
            return None
        return data

    with ThreadPoolExecutor(8) as pool:
        won = [data for data in pool.map(attempt, range(8)) if data is not None]
    assert len(won) == 1
    assert read(reopen()) == won[0]


def test_no_increment_is_lost_between_writers(reopen: Callable[[], Store]) -> None:
    reopen().create(KEY, b"0")

    def add(times: int) -> None:
        store = reopen()
        while times:
            found = store.get(KEY)
            assert isinstance(found, StoredObject)
            try:
                store.replace(KEY, b"%d" % (int(found.data) + 1), etag=found.etag)
            except PreconditionFailed:
                continue
            times -= 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, [6] * 3))
    assert read(reopen()) == b"18"


def test_readers_never_see_a_torn_object(reopen: Callable[[], Store]) -> None:
    size, stop = 200_000, threading.Event()
    reopen().overwrite(KEY, b"\0" * size)

    def look() -> set[int]:
        store, seen = reopen(), set()
        while not stop.is_set():
            data = read(store)
            assert len(data) == size
            assert data == data[:1] * size
            seen.add(data[0])
        return seen

    with ThreadPoolExecutor(3) as pool:
        looks = [pool.submit(look) for _ in range(2)]
        store, etag = reopen(), reopen().overwrite(KEY, b"\1" * size)
        for value in range(2, 22):
            etag = store.replace(KEY, bytes([value]) * size, etag=etag)
        stop.set()
        assert all(look.result() for look in looks)

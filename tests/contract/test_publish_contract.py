"""A run through the contract over every store: claim, publish, take over, fetch, end, delete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from adapter_bucket.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    NotPublished,
    StoreUnavailable,
)
from adapter_bucket.fetch import RunReader, discover_runs, fetch_version
from adapter_bucket.layout import ADAPTER_FILES, file_key, manifest_key
from adapter_bucket.lifecycle import collect, delete_run, finish_run
from adapter_bucket.manifest import RunState
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from tests.adapters import BASE, adapter_file, version

RUN = "run-1"


def claim(store: Store, writer_id: str = "first", *, takeover: bool = False) -> RunWriter:
    return RunWriter.claim(
        store, RUN, base_model=BASE, window=2, writer_id=writer_id, takeover=takeover
    )


def versions_with_objects(store: Store) -> list[int]:
    keys = store.list(f"runs/{RUN}/adapters/")
    return sorted({int(key.split("/")[3][1:]) for key in keys})


def test_a_published_version_arrives_as_a_peft_directory(store: Store, tmp_path: Path) -> None:
    writer = claim(store)
    entry = writer.publish(1, **version(1))
    manifest = RunReader(store, RUN).poll()
    assert manifest is not None
    assert manifest.latest == 1
    assert manifest.versions == [entry]
    folder = fetch_version(store, RUN, entry, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER_FILES)
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter_file(1)
    # The object in the bucket and the file made from the manifest are the same bytes.
    stored = store.get(file_key(RUN, 1, "adapter_config.json"))
    assert stored.data == (folder / "adapter_config.json").read_bytes()  # type: ignore[union-attr]


def test_an_unchanged_manifest_is_polled_without_an_answer(store: Store) -> None:
    writer, reader = claim(store), RunReader(store, RUN)
    assert reader.poll() is not None
    assert reader.poll() is None
    writer.publish(1, **version(1))
    polled = reader.poll()
    assert polled is not None
    assert polled.latest == 1


def test_old_versions_leave_after_a_grace_of_one(store: Store) -> None:
    writer = claim(store)
    for number in range(1, 6):
        writer.publish(number, **version(number))
    writer.close(RunState.FINISHED)
    assert [entry.version for entry in writer.manifest.versions] == [3, 4, 5]
    assert [entry.version for entry in writer.manifest.window_versions()] == [4, 5]
    assert versions_with_objects(store) == [3, 4, 5]


def test_a_second_writer_is_refused_by_the_name_of_the_first(store: Store) -> None:
    claim(store, "first")
    with pytest.raises(FencedError, match="'first'"):
        claim(store, "second")


def test_a_taken_over_writer_is_fenced_and_nothing_of_it_is_visible(
    reopen: Callable[[], Store],
) -> None:
    old = claim(reopen(), "old")
    old.publish(1, **version(1))
    new = claim(reopen(), "new", takeover=True)
    with pytest.raises(FencedError, match="'new'"):
        old.publish(2, **version(2))
    with pytest.raises(FencedError):
        old.close(RunState.FINISHED)
    manifest = RunReader(reopen(), RUN).poll()
    assert manifest is not None
    assert manifest.latest == 1
    assert manifest.writer.id == "new"
    # What the old writer left is skipped, not overwritten: one number, one set of bytes.
    assert versions_with_objects(reopen()) == [1, 2]
    assert claim(reopen(), "third", takeover=True).next_version == 3
    assert new.next_version == 2


def test_one_of_many_claimers_owns_the_run(reopen: Callable[[], Store]) -> None:
    barrier = threading.Barrier(4)
    winners: list[RunWriter] = []

    def attempt(number: int) -> None:
        store = reopen()
        barrier.wait()
        with suppress(FencedError):
            winners.append(claim(store, f"writer {number}"))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    winners[0].publish(1, **version(1))


def test_publishing_again_with_the_same_bytes_changes_nothing(store: Store) -> None:
    writer = claim(store)
    first = writer.publish(1, **version(1))
    assert writer.publish(1, **version(1)) == first
    with pytest.raises(ConfigError, match="never published twice"):
        writer.publish(1, **version(2))


def test_a_number_a_crashed_writer_used_is_skipped_and_not_overwritten(store: Store) -> None:
    claim(store)
    store.create(file_key(RUN, 1, "adapter_model.safetensors"), b"of a crashed writer")
    writer = claim(store, takeover=True)
    with pytest.raises(IntegrityError, match="crashed writer"):
        writer.publish(1, **version(1))
    assert writer.next_version == 2
    writer.publish(2, **version(2))


def test_a_number_whose_publish_was_given_up_is_not_offered_again() -> None:
    away = True

    def fail(phase: str, call: str, key: str) -> None:
        if away and (phase, call) == ("before", "replace"):
            raise StoreUnavailable("503")

    store = MemoryStore(hook=fail)
    writer = claim(store)
    with pytest.raises(StoreUnavailable):
        writer.publish(1, **version(1))
    away = False
    with pytest.raises(IntegrityError, match=r"Publish RunWriter\.next_version instead"):
        writer.publish(1, **version(2))
    writer.publish(writer.next_version, **version(2))
    assert [entry.version for entry in writer.manifest.versions] == [2]
    assert writer.next_version == 3


def test_a_fenced_writer_that_woke_up_cannot_block_a_number(
    reopen: Callable[[], Store], tmp_path: Path
) -> None:
    old = claim(reopen(), "old")
    new = claim(reopen(), "new", takeover=True)
    with pytest.raises(FencedError, match="'new'"):
        old.publish(1, **version(1))
    entry = new.publish(1, **version(10))
    folder = fetch_version(reopen(), RUN, entry, tmp_path)
    assert (folder / "adapter_model.safetensors").read_bytes() == adapter_file(10)
    with pytest.raises(FencedError):
        old.publish(1, **version(1))
    assert fetch_version(reopen(), RUN, entry, tmp_path / "again")


def test_a_claim_that_fails_after_all_is_no_other_writers(store: Store) -> None:
    """The listing fails, which decides the next version's number; then the trainer tries again."""
    claim(store).publish(1, **version(1))

    class Unlisted:
        """The store, whose versions cannot be listed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def list(self, prefix: str) -> Iterator[str]:
            if "/adapters/" in prefix:
                raise StoreUnavailable("no listing today")
            return store.list(prefix)

    with pytest.raises(StoreUnavailable, match="no listing today"):
        claim(cast(Store, Unlisted()), "second", takeover=True)
    writer = claim(store, "second")
    assert writer.next_version == 2


def test_orphans_go_once_a_later_version_passed_them(store: Store) -> None:
    writer = claim(store)
    store.create(file_key(RUN, 1, "adapter_model.safetensors"), b"of a crashed writer")
    assert collect(store, RUN, older_than_s=-5).keys == []
    writer.publish(2, **version(2))
    planned = collect(store, RUN, older_than_s=-5, dry_run=True)
    assert planned.keys == [file_key(RUN, 1, "adapter_model.safetensors")]
    assert collect(store, RUN, older_than_s=3600).keys == []
    assert collect(store, RUN, older_than_s=-5).keys == planned.keys
    assert versions_with_objects(store) == [2]


def test_a_damaged_object_is_never_kept(store: Store, tmp_path: Path) -> None:
    writer = claim(store)
    entry = writer.publish(1, **version(1))
    damaged = bytearray(adapter_file(1))
    damaged[-1] ^= 1
    store.overwrite(file_key(RUN, 1, "adapter_model.safetensors"), damaged)
    with pytest.raises(IntegrityError, match="sha256"):
        fetch_version(store, RUN, entry, tmp_path)
    assert list((tmp_path / RUN).iterdir()) == []


def test_a_version_out_of_retention_is_not_published(store: Store, tmp_path: Path) -> None:
    writer = claim(store)
    entry = writer.publish(1, **version(1))
    store.delete(file_key(RUN, 1, name) for name in ADAPTER_FILES)
    with pytest.raises(NotPublished, match="retention"):
        fetch_version(store, RUN, entry, tmp_path)


def test_an_ended_run_is_continued_without_a_takeover(store: Store) -> None:
    writer = claim(store)
    writer.publish(1, **version(1))
    writer.close(RunState.INTERRUPTED)
    again = claim(store, "second")
    assert again.manifest.writer.epoch == 2
    assert again.next_version == 2
    again.publish(2, **version(2))


def test_a_run_can_be_finished_from_outside(store: Store) -> None:
    writer = claim(store)
    finish_run(store, RUN, by="an operator")
    with pytest.raises(FencedError, match="an operator"):
        writer.publish(1, **version(1))
    manifest = RunReader(store, RUN).poll()
    assert manifest is not None
    assert manifest.state is RunState.FINISHED


def test_a_deleted_run_leaves_a_tombstone_that_keeps_its_names(store: Store) -> None:
    writer, reader = claim(store), RunReader(store, RUN)
    writer.publish(1, **version(1))
    assert delete_run(store, RUN, by="an operator") == 2
    assert list(store.list(f"runs/{RUN}/")) == [manifest_key(RUN)]
    manifest = reader.poll()
    assert manifest is not None
    assert (manifest.state, manifest.latest, manifest.versions) == (RunState.DELETED, 1, [])
    with pytest.raises(ConfigError, match="deleted"):
        claim(store, takeover=True)
    with pytest.raises(FencedError):
        writer.publish(2, **version(2))


def test_a_purged_run_leaves_nothing(store: Store) -> None:
    claim(store).publish(1, **version(1))
    delete_run(store, RUN, by="an operator", purge=True)
    assert list(store.list("runs/")) == []
    with pytest.raises(NotPublished):
        delete_run(store, RUN, by="an operator", purge=True)


def test_runs_are_discovered_by_valid_names_only(store: Store) -> None:
    claim(store)
    store.create("runs/-hostile/manifest.json", b"{}")
    store.create("runs/a b/manifest.json", b"{}")
    assert discover_runs(store) == [RUN]

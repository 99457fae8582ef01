"""Checkpoints in the bucket, on every store: complete or absent, one writer, no garbage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_bucket.checkpoint_fetch import ASIDE_PREFIX, fetch_checkpoint, fetch_newest
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    NotPublished,
    StoreUnavailable,
)
from adapter_bucket.layout import (
    checkpoint_file_key,
    checkpoint_index_key,
    checkpoints_prefix,
    parse_checkpoint_key,
)
from adapter_bucket.lifecycle import collect, delete_run
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from tests.adapters import version
from tests.checkpoints import FACTS, claim, entries, put_checkpoint, read_folder, write_checkpoint

RUN = "run-1"


def test_a_checkpoint_comes_back_byte_for_byte(store: Store, tmp_path: Path) -> None:
    content = write_checkpoint(tmp_path / "made", 1, big_bytes=3_000_000)
    put_checkpoint(store, claim(store), tmp_path / "made", 500)
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert found[1] == tmp_path / "out" / "checkpoint-500"
    assert read_folder(found[1]) == content


def test_a_large_file_travels_in_parts(
    reopen: Callable[[], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen()
    if hasattr(store, "settings"):
        from dataclasses import replace

        store.settings = replace(
            store.settings, multipart_bytes=5 * 1024**2, part_bytes=5 * 1024**2
        )
    content = write_checkpoint(tmp_path / "made", 2, big_bytes=12_000_001)
    put_checkpoint(store, claim(store), tmp_path / "made", 1)
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert read_folder(found[1]) == content


def test_nothing_is_seen_before_the_commit(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    writer = claim(store)
    CheckpointUpload(store, RUN, tmp_path / "made", step=1, epoch=1, trainer=FACTS).run()
    assert fetch_newest(store, RUN, tmp_path / "out") is None
    # The owner may be about to commit it: a collector leaves it alone …
    collect(store, RUN, older_than_s=-5)
    assert len(list(store.list(checkpoints_prefix(RUN)))) == 6
    # … until the owner committed a later one, or was fenced.
    put_checkpoint(store, writer, tmp_path / "made", 2)
    collect(store, RUN, older_than_s=-5)
    assert {parse_checkpoint_key(key) for key in store.list(checkpoints_prefix(RUN))} == {
        (RUN, 2, 1)
    }


def test_the_newest_stay_and_the_index_goes_first(store: Store, tmp_path: Path) -> None:
    writer = claim(store)
    for step in (10, 20, 30):
        write_checkpoint(tmp_path / str(step), step)
        put_checkpoint(store, writer, tmp_path / str(step), step)
    assert [entry.step for entry in entries(store)] == [20, 30]
    kept = {parse_checkpoint_key(key) for key in store.list(checkpoints_prefix(RUN))}
    assert kept == {(RUN, 20, 1), (RUN, 30, 1)}


def test_an_index_is_deleted_before_its_files(tmp_path: Path) -> None:
    deleted: list[str] = []

    def hook(phase: str, name: str, key: str) -> None:
        if (phase, name) == ("before", "delete"):
            deleted.append(key)

    store = MemoryStore(hook=hook)
    write_checkpoint(tmp_path / "made", 1)
    writer = claim(store)
    for step in (1, 2):
        put_checkpoint(store, writer, tmp_path / "made", step, limit=1)
    assert deleted[0] == checkpoint_index_key(RUN, 1, 1)
    assert len(deleted) == 6


def test_versions_and_checkpoints_share_one_manifest(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    writer = claim(store)
    writer.publish(1, **version(1))
    put_checkpoint(store, writer, tmp_path / "made", 1)
    writer.publish(2, **version(2))
    assert [entry.step for entry in entries(store)] == [1]
    heir = claim(store)
    assert heir.next_version == 3
    assert [entry.step for entry in heir.manifest.checkpoints] == [1]


def test_a_fenced_writer_commits_no_checkpoint(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    old = claim(store, writer_id="old")
    waiting = CheckpointUpload(store, RUN, tmp_path / "made", step=5, epoch=1, trainer=FACTS).run()
    heir = claim(store, writer_id="heir")
    stopped = CheckpointWriter(store, old.ownership, limit=2)
    with pytest.raises(FencedError, match="'heir'"):
        stopped.confirm()
    with pytest.raises(FencedError, match="'heir'"):
        stopped.commit(waiting)
    assert entries(store) == []
    # The same step again, by the heir: other keys, so the old one can do no harm.
    content = write_checkpoint(tmp_path / "again", 2)
    put_checkpoint(store, heir, tmp_path / "again", 5)
    CheckpointUpload(store, RUN, tmp_path / "made", step=5, epoch=1, trainer=FACTS).run()
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert read_folder(found[1]) == content


def test_the_next_writer_removes_what_a_crash_left(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    put_checkpoint(store, claim(store), tmp_path / "made", 1)
    CheckpointUpload(store, RUN, tmp_path / "made", step=2, epoch=1, trainer=FACTS).run()
    heir = claim(store)
    assert CheckpointWriter(store, heir.ownership, limit=2).clean() == 1
    assert {parse_checkpoint_key(key) for key in store.list(checkpoints_prefix(RUN))} == {
        (RUN, 1, 1)
    }
    assert CheckpointWriter(store, heir.ownership, limit=2).clean() == 0


def test_an_upload_goes_on_after_a_failure(tmp_path: Path) -> None:
    puts: list[str] = []

    def hook(phase: str, name: str, key: str) -> None:
        if name == "create" and "checkpoints" in key:
            if phase == "before":
                puts.append(key)
            if len(puts) == 3 and phase == "after":
                raise StoreUnavailable("the answer was lost")

    store = MemoryStore()
    writer = claim(store)
    write_checkpoint(tmp_path / "made", 1)
    upload = CheckpointUpload(
        store.view(hook), RUN, tmp_path / "made", step=1, epoch=1, trainer=FACTS
    )
    with pytest.raises(StoreUnavailable):
        upload.run()
    CheckpointWriter(store, writer.ownership, limit=1).commit(upload.run())
    assert fetch_newest(store, RUN, tmp_path / "out") is not None


def test_a_file_that_is_written_again_fails_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)

    def hook(phase: str, name: str, key: str) -> None:
        if (phase, name) == ("before", "create") and key.endswith("optimizer.pt"):
            (tmp_path / "made" / "optimizer.pt").write_bytes(b"x" * 200)

    store = MemoryStore(hook=hook)
    claim(store)
    with pytest.raises(IntegrityError, match=r"optimizer\.pt was written again"):
        CheckpointUpload(store, RUN, tmp_path / "made", step=1, epoch=1, trainer=FACTS).run()


def test_steps_go_up_within_an_epoch(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    writer = claim(store)
    put_checkpoint(store, writer, tmp_path / "made", 20)
    with pytest.raises(ConfigError, match="not newer"):
        put_checkpoint(store, writer, tmp_path / "made", 10)
    heir = claim(store)  # went back to an earlier checkpoint: its newest is what counts
    put_checkpoint(store, heir, tmp_path / "made", 10)
    assert [(entry.step, entry.epoch) for entry in entries(store)] == [(20, 1), (10, 2)]
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert found[0].step == 10


@pytest.mark.parametrize("damage", ["gone", "changed", "longer"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    store: Store, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = write_checkpoint(tmp_path / "made", 1)
    writer = claim(store)
    put_checkpoint(store, writer, tmp_path / "made", 1)
    newest = put_checkpoint(store, writer, tmp_path / "made", 2)
    key = checkpoint_file_key(RUN, 2, 1, "optimizer.pt")
    store.delete([key])
    if damage == "gone":
        with pytest.raises(NotPublished, match="checkpoint 2"):
            fetch_checkpoint(store, RUN, newest, tmp_path / "out")
        return
    store.create(key, b"y" * 200 if damage == "changed" else b"y" * 201)
    with pytest.raises(IntegrityError, match=r"optimizer\.pt"):
        fetch_checkpoint(store, RUN, newest, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert found[0].step == 1
    assert read_folder(found[1]) == first
    assert "The checkpoint before it is taken" in caplog.text


def test_a_local_directory_of_the_same_step_is_used_or_kept_aside(tmp_path: Path) -> None:
    store = MemoryStore()
    content = write_checkpoint(tmp_path / "out/checkpoint-5", 1)
    put_checkpoint(store, claim(store), tmp_path / "out/checkpoint-5", 5)
    downloads: list[str] = []
    watched = store.view(lambda _phase, name, key: downloads.append(f"{name} {key}"))
    assert fetch_newest(watched, RUN, tmp_path / "out") is not None
    assert not [one for one in downloads if one.startswith("download")]
    (tmp_path / "out/checkpoint-5/optimizer.pt").write_bytes(b"half")
    assert fetch_newest(store, RUN, tmp_path / "out") is not None
    assert read_folder(tmp_path / "out/checkpoint-5") == content
    (aside,) = (tmp_path / "out").glob(f"{ASIDE_PREFIX}*")
    assert (aside / "optimizer.pt").read_bytes() == b"half"


def test_keys_protect_a_checkpoint(store: Store, tmp_path: Path) -> None:
    """With keys, what an attacker with write access put there is refused before it is read."""
    keys = SigningKeys.parse("k1:" + "ab" * 16)
    write_checkpoint(tmp_path / "made", 1)
    put_checkpoint(store, claim(store), tmp_path / "made", 1)  # unsigned
    with pytest.raises(IntegrityError, match="not signed"):
        fetch_newest(store, RUN, tmp_path / "out", signing=keys)


def test_a_deleted_run_has_no_checkpoints(store: Store, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    put_checkpoint(store, claim(store), tmp_path / "made", 1)
    delete_run(store, RUN, by="somebody")
    assert entries(store) == []
    assert list(store.list(checkpoints_prefix(RUN))) == []

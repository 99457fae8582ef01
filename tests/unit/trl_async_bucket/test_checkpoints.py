"""The background uploader: newest wins, deletions under its hands, and how failures end a run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_bucket.checkpoint_fetch import fetch_newest
from adapter_bucket.checkpoint_upload import CheckpointWriter
from adapter_bucket.errors import ConfigError, FencedError, StoreDenied, StoreUnavailable
from adapter_bucket.fencing import read_manifest
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from tests.checkpoints import FACTS, claim, read_folder, write_checkpoint
from trl_async_bucket import checkpoints
from trl_async_bucket.checkpoints import MAX_FAILED, CheckpointUploader
from trl_async_bucket.staging import STAGE_DIR, discard_leftovers, stage

RUN = "run-1"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_PAUSES_S", (0.0, 0.0))


def uploader(store: Store) -> CheckpointUploader:
    return CheckpointUploader(store, CheckpointWriter(store, claim(store).ownership, limit=2))


def steps(store: Store) -> list[int]:
    found = read_manifest(store, RUN, SigningKeys())
    return [entry.step for entry in found.manifest.checkpoints] if found else []


def save(output_dir: Path, step: int) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    write_checkpoint(folder, step)
    return folder


def staged(output_dir: Path) -> list[Path]:
    return list((output_dir / STAGE_DIR).glob("*"))


class Gate:
    """Holds the store's n-th write of a checkpoint until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, phase: str, name: str, key: str) -> None:
        if phase == "before" and name == "create" and key.endswith("checkpoint-1/e1/optimizer.pt"):
            self.reached.set()
            assert self.open.wait(20)


def test_a_checkpoint_arrives_in_the_background(tmp_path: Path) -> None:
    store = MemoryStore()
    background = uploader(store)
    folder = save(tmp_path, 5)
    content = read_folder(folder)
    background.submit(folder, step=5, trainer=FACTS)
    assert background.drain(20)
    background.stop(20)
    assert background.committed_step == 5
    (record,) = background.take_records()
    assert (record.step, record.nbytes) == (5, 800)
    found = fetch_newest(store, RUN, tmp_path / "other machine")
    assert found is not None
    assert read_folder(found[1]) == content
    assert staged(tmp_path) == []


def test_submit_does_not_wait_and_the_newest_wins(tmp_path: Path) -> None:
    gate, store = Gate(), MemoryStore()
    background = uploader(store.view(gate))
    background.submit(save(tmp_path, 1), step=1, trainer=FACTS)
    assert gate.reached.wait(20)
    started = time.monotonic()
    for step in (2, 3, 4):
        background.submit(save(tmp_path, step), step=step, trainer=FACTS)
    assert time.monotonic() - started < 5
    assert background.skipped == 2
    assert not background.drain(0.05)
    gate.open.set()
    assert background.drain(20)
    assert steps(store) == [1, 4]  # what was under way is brought to its end
    assert staged(tmp_path) == []


def test_the_trainer_may_delete_a_checkpoint_while_it_is_uploaded(tmp_path: Path) -> None:
    """``save_total_limit=1``: the next save removes the directory under the upload's hands."""
    gate, store = Gate(), MemoryStore()
    background = uploader(store.view(gate))
    folder = save(tmp_path, 1)
    content = read_folder(folder)
    background.submit(folder, step=1, trainer=FACTS)
    assert gate.reached.wait(20)
    shutil.rmtree(folder)
    gate.open.set()
    assert background.drain(20)
    found = fetch_newest(store, RUN, tmp_path / "out")
    assert found is not None
    assert read_folder(found[1]) == content


def test_without_hard_links_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_links(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    folder = save(tmp_path, 1)
    content = read_folder(folder)
    monkeypatch.setattr(os, "link", no_links)
    copied = stage(folder)
    shutil.rmtree(folder)
    assert read_folder(copied) == content
    assert "allows no hard links: 800 bytes" in caplog.text


def test_a_failed_staging_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    folder = save(tmp_path, 1)
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="no space"):
        stage(folder)
    assert staged(tmp_path) == []


def test_what_a_killed_trainer_staged_is_removed(tmp_path: Path) -> None:
    stage(save(tmp_path, 1))
    discard_leftovers(tmp_path)
    assert staged(tmp_path) == []
    assert (tmp_path / "checkpoint-1").is_dir()


def failing(error: Callable[[], Exception], *, times: int) -> Callable[[str, str, str], None]:
    left = [times]

    def hook(phase: str, name: str, key: str) -> None:
        if phase == "before" and name == "create" and "optimizer.pt" in key and left[0]:
            left[0] -= 1
            raise error()

    return hook


def test_an_outage_that_passes_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    background = uploader(store.view(failing(lambda: StoreUnavailable("503"), times=2)))
    background.submit(save(tmp_path, 1), step=1, trainer=FACTS)
    assert background.drain(20)
    assert steps(store) == [1]
    assert "uploading checkpoint 1 again" in caplog.text


def test_checkpoints_that_keep_failing_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    store = MemoryStore()
    background = uploader(store.view(failing(lambda: StoreUnavailable("503"), times=1000)))
    for step in range(1, MAX_FAILED + 1):
        background.check()
        background.submit(save(tmp_path, step), step=step, trainer=FACTS)
        assert not background.drain(20)
    with pytest.raises(StoreUnavailable, match=r"last 3 checkpoints.*503.*bucket_checkpoints"):
        background.check()
    with pytest.raises(StoreUnavailable):
        background.submit(save(tmp_path, 9), step=9, trainer=FACTS)
    assert caplog.text.count("did not get into the bucket") == MAX_FAILED
    background.stop(20)
    assert staged(tmp_path) == []


def test_a_success_forgets_failures(tmp_path: Path) -> None:
    store = MemoryStore()
    # Three attempts a checkpoint: the first two checkpoints fail, the third comes through.
    background = uploader(store.view(failing(lambda: StoreUnavailable("503"), times=6)))
    for step in (1, 2, 3):
        background.submit(save(tmp_path, step), step=step, trainer=FACTS)
        background.drain(20)
    background.check()
    assert steps(store) == [3]


@pytest.mark.parametrize("error", [StoreDenied("no permission"), ConfigError("never")])
def test_what_never_mends_itself_stops_the_training_at_once(
    tmp_path: Path, error: Exception
) -> None:
    background = uploader(MemoryStore(hook=failing(lambda: error, times=1)))
    background.submit(save(tmp_path, 1), step=1, trainer=FACTS)
    assert not background.drain(20)
    with pytest.raises(type(error), match=str(error)):
        background.check()


def test_a_trainer_that_lost_its_run_uploads_nothing_and_stops(tmp_path: Path) -> None:
    puts: list[str] = []
    store = MemoryStore()
    background = uploader(store.view(lambda _phase, name, key: puts.append(f"{name} {key}")))
    claim(store, writer_id="heir")
    background.submit(save(tmp_path, 1), step=1, trainer=FACTS)
    background.drain(20)
    with pytest.raises(FencedError, match="'heir'"):
        background.check()
    assert not [one for one in puts if one.startswith("create runs/run-1/checkpoints")]


def test_stop_gives_up_between_two_files(tmp_path: Path) -> None:
    gate, store = Gate(), MemoryStore()
    background = uploader(store.view(gate))
    background.submit(save(tmp_path, 1), step=1, trainer=FACTS)
    assert gate.reached.wait(20)
    background.submit(save(tmp_path, 2), step=2, trainer=FACTS)
    background.stop(0.01)
    gate.open.set()
    background.stop(20)
    background.check()  # being stopped is no failure
    assert steps(store) == []
    assert staged(tmp_path) == []

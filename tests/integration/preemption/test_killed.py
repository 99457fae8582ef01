"""The trainer is killed at every step of its work, and goes on each time on another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.checkpoint_fetch import fetch_checkpoint, read_index
from adapter_bucket.errors import NotPublished
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.layout import checkpoints_prefix, parse_checkpoint_key
from adapter_bucket.lifecycle import collect
from adapter_bucket.manifest import RunState
from adapter_bucket.store import Store
from tests.integration.preemption.conftest import RUN, Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MANIFEST = "replace runs/run/manifest"
CHECKPOINT = "runs/run/checkpoints/checkpoint-[0-9]+/e[0-9]+"
KILLS = [
    "9:snapshot",
    "4:before create .*adapter_config",
    "4:after create .*adapter_model",
    f"4:before {MANIFEST}",
    f"4:after {MANIFEST}",
    f"1:before upload {CHECKPOINT}/",
    f"1:after upload {CHECKPOINT}/optimizer.pt",
    f"1:before create {CHECKPOINT}.json",
    f"1:after create {CHECKPOINT}.json",
    # The commit of a checkpoint is a write of the manifest like any other.
    f"7:after {MANIFEST}",
    f"1:after delete {CHECKPOINT}.json",
    f"1:before delete {CHECKPOINT}/",
    f"1:after delete {CHECKPOINT}/",
]


class Watcher:
    """Reads all the time what the manifest names, versions and checkpoints."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._digests: dict[int, str] = {}
        self.versions: set[int] = set()
        self.checkpoints: set[tuple[int, int]] = set()

    def look(self, reader: RunReader) -> None:
        try:
            manifest = reader.poll()
        except NotPublished:
            return
        if manifest is None:
            return
        for entry in manifest.versions:
            # One name, one set of weights: a number is never used twice.
            digest = self._digests.setdefault(entry.version, entry.weights.sha256)
            assert digest == entry.weights.sha256, f"version {entry.version} has two contents"
        try:
            if manifest.versions:
                fetch_version(self._store, RUN, manifest.versions[-1], self._folder / "versions")
                self.versions.add(manifest.latest)
            if manifest.checkpoints:
                newest = manifest.checkpoints[-1]
                place = (newest.epoch, newest.step)
                if place not in self.checkpoints:
                    out = self._folder / f"{newest.epoch}-{newest.step}"
                    fetch_checkpoint(self._store, RUN, newest, out)
                    self.checkpoints.add(place)
        except NotPublished:  # retired meanwhile; anything torn is an IntegrityError
            pass


@contextmanager
def watched(store: Store, folder: Path) -> Iterator[Watcher]:
    watcher, stop, faults = Watcher(store, folder), threading.Event(), list[BaseException]()

    def run() -> None:
        reader = RunReader(store, RUN)
        try:
            while not stop.is_set():
                watcher.look(reader)
                time.sleep(0.005)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watcher
    finally:
        stop.set()
        thread.join()
    assert faults == []


def test_a_trainer_killed_anywhere_goes_on_as_if_nothing_had_happened(
    bench: Bench, undisturbed: dict[str, Any]
) -> None:
    with watched(bench.store, bench.folder / "watched") as watcher:
        kills = [word for point in KILLS for word in ("--kill-at", point)]
        trainer = bench.start("machines", "--step-s", "0.02", *kills)
        code, _ = trainer.end(timeout_s=120)
        assert code == 0, trainer.tail()
    died = [event["died"] for event in trainer.of("died")]
    assert len(died) == len(KILLS), died
    lives = trainer.of("began")
    assert len(lives) == len(KILLS) + 1
    # Every life is the owner, and its numbers are above all that came before.
    assert [one["epoch"] for one in lives] == list(range(1, len(lives) + 1))
    check_numbers(trainer.events)
    assert [one["began"] for one in lives] == sorted(one["began"] for one in lives)
    assert lives[-1]["began"] >= 8
    assert watcher.versions
    assert len(watcher.checkpoints) >= 3
    # Bit for bit what an undisturbed run comes to: nothing was lost, nothing trained twice.
    assert trainer.of("finished")[-1] == undisturbed
    check_rest(bench)


def check_numbers(events: list[dict[str, Any]]) -> None:
    """Within a life versions go up by one a step.

    A number that a dead trainer took but never wrote may come again: nobody else ever knew it. That
    no *published* number does is the watcher's to see.
    """
    current: list[int] = []
    for event in events:
        if "began" in event:
            current = []
        if "version" in event:
            assert not current or event["version"] == current[-1] + 1
            current.append(event["version"])


def check_rest(bench: Bench) -> None:
    """The finished run, whole and clean."""
    manifest = bench.manifest()
    assert manifest.state is RunState.FINISHED
    assert len(manifest.checkpoints) == 2
    assert manifest.checkpoints[-1].step == 120  # the one before it may have lost to a newer one
    for entry in manifest.checkpoints:
        assert read_index(bench.store, RUN, entry).trainer.world_size == 1
    collect(bench.store, RUN, older_than_s=-5)
    left = {parse_checkpoint_key(key) for key in bench.store.list(checkpoints_prefix(RUN))}
    assert left == {(RUN, entry.step, entry.epoch) for entry in manifest.checkpoints}

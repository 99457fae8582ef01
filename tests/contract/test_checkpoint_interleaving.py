"""Two trainers, a reader and the collector in any order, and cut off anywhere."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_bucket import checkpoint_upload
from adapter_bucket.checkpoint_fetch import fetch_newest, read_index
from adapter_bucket.checkpoint_upload import CheckpointWriter
from adapter_bucket.errors import FencedError, NotPublished, StoreUnavailable
from adapter_bucket.layout import checkpoint_file_key, checkpoints_prefix, parse_checkpoint_key
from adapter_bucket.lifecycle import collect
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.store import StoredObject
from tests.checkpoints import claim, entries, put_checkpoint, read_folder, write_checkpoint
from tests.contract.interleaving import Client, Fate, collector, fates

RUN = "run-1"


def trainer(name: str, folder: Path, steps: list[int]) -> Callable[[MemoryStore], None]:
    def body(store: MemoryStore) -> None:
        with suppress(FencedError, StoreUnavailable):
            writer = claim(store, writer_id=name)
            checkpoints = CheckpointWriter(store, writer.ownership, limit=1)
            checkpoints.clean()
            for step in steps:
                put_checkpoint(store, writer, folder, step, limit=1)

    return body


def fetcher(folder: Path, contents: list[dict[str, bytes]]) -> Callable[[MemoryStore], None]:
    def body(store: MemoryStore) -> None:
        for attempt in range(3):
            with suppress(NotPublished, StoreUnavailable):
                found = fetch_newest(store, RUN, folder / str(attempt))
                if found is not None:
                    assert read_folder(found[1]) in contents

    return body


@given(schedule=st.lists(st.tuples(st.integers(0, 3), fates), max_size=100))
@settings(max_examples=25)
def test_checkpoints_are_whole_in_any_interleaving(schedule: list[tuple[int, Fate]]) -> None:
    """Two trainers, a reader and the collector; after each call, what is named is whole."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as temporary:
        patch.setattr(checkpoint_upload, "SMALL_BYTES", -1)  # one thread per client
        patch.setattr("adapter_bucket.checkpoint_fetch.PARALLEL", 1)
        folder, base = Path(temporary), MemoryStore()
        contents = [write_checkpoint(folder / name, seed) for seed, name in enumerate("ab")]
        clients = [
            Client(base, trainer("a", folder / "a", [1, 2])),
            Client(base, trainer("b", folder / "b", [2])),
            Client(base, fetcher(folder / "out", contents)),
            Client(base, collector(RUN)),
        ]

        def check() -> None:
            for entry in entries(base):
                index = read_index(base, RUN, entry)
                for name, file in index.files.items():
                    stored = base.get(checkpoint_file_key(RUN, entry.step, entry.epoch, name))
                    assert isinstance(stored, StoredObject)
                    assert hashlib.sha256(stored.data).hexdigest() == file.sha256

        for choice, fate in schedule:
            alive = [client for client in clients if not client.finished]
            if not alive:
                break
            alive[choice % len(alive)].step(fate)
            check()
        for client in clients:
            while not client.finished:
                client.step(Fate.GO)
                check()
        assert [client.fault for client in clients if client.fault] == []
        if entries(base):
            claim(base)
            collect(base, RUN, older_than_s=-5)
            named = {(RUN, entry.step, entry.epoch) for entry in entries(base)}
            left = {parse_checkpoint_key(key) for key in base.list(checkpoints_prefix(RUN))}
            assert left == named

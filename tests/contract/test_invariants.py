"""Two publishers, three readers and the garbage collector, in any order, with losses and crashes.

The names of the checks are the names of the invariants in ``docs/protocol.md``.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_bucket import upload
from adapter_bucket.errors import FencedError, IntegrityError, NotPublished, StoreUnavailable
from adapter_bucket.fencing import read_manifest
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.layout import ADAPTER_FILES, file_key
from adapter_bucket.lifecycle import collect
from adapter_bucket.manifest import Manifest
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import StoredObject
from tests.adapters import BASE, version
from tests.contract.interleaving import Client, Fate, Inline, collector, fates

RUN = "run-1"
WINDOW = 1
RETRIES = 6

VERSIONS = [version(seed, layers=1, width=4) for seed in range(64)]


class History:
    """What the checks remember between two steps."""

    def __init__(self, base: MemoryStore) -> None:
        self.base = base
        self.last: Manifest | None = None
        self.digests: dict[int, str] = {}
        self.contents: dict[str, bytes] = {}
        self.owners: dict[int, str | None] = {}

    def check(self) -> None:
        found = read_manifest(self.base, RUN, SigningKeys())
        manifest = found.manifest if found else None
        if manifest is None:
            assert self.last is None
            return
        self.check_complete(manifest)
        self.check_immutable_objects(manifest)
        self.check_forward(manifest)
        self.check_one_name_one_content(manifest)
        self.check_single_writer(manifest)
        self.last = manifest

    def check_complete(self, manifest: Manifest) -> None:
        """complete: every version the manifest names has its objects, with their digests."""
        for entry in manifest.versions:
            for name in ADAPTER_FILES:
                stored = self.base.get(file_key(RUN, entry.version, name))
                assert isinstance(stored, StoredObject)
                assert hashlib.sha256(stored.data).hexdigest() == entry.files[name].sha256

    def check_forward(self, manifest: Manifest) -> None:
        """forward: (epoch, latest) never goes down."""
        if self.last is not None:
            before = (self.last.writer.epoch, self.last.latest)
            assert (manifest.writer.epoch, manifest.latest) >= before
            assert manifest.latest >= self.last.latest

    def check_one_name_one_content(self, manifest: Manifest) -> None:
        """one name, one content: a version number never stands for two sets of bytes."""
        for entry in manifest.versions:
            digest = self.digests.setdefault(entry.version, entry.weights.sha256)
            assert digest == entry.weights.sha256

    def check_single_writer(self, manifest: Manifest) -> None:
        """single writer: an epoch belongs to one claim, for ever."""
        owner = self.owners.setdefault(manifest.writer.epoch, manifest.writer.token)
        assert owner == manifest.writer.token

    def check_immutable_objects(self, manifest: Manifest) -> None:
        """immutable: a version's objects never change while a manifest names it."""
        for entry in manifest.versions:
            for name in ADAPTER_FILES:
                key = file_key(RUN, entry.version, name)
                stored = self.base.get(key)
                assert isinstance(stored, StoredObject)
                assert self.contents.setdefault(key, stored.data) == stored.data


def publisher(name: str, seeds: list[int]) -> Callable[[MemoryStore], None]:
    def patiently(call: Callable[[], object]) -> object:
        for _ in range(RETRIES):
            with suppress(StoreUnavailable):
                return call()
        raise StoreUnavailable("gave up")

    def body(store: MemoryStore) -> None:
        with suppress(FencedError, StoreUnavailable):
            writer = patiently(
                lambda: RunWriter.claim(
                    store,
                    RUN,
                    base_model=BASE,
                    window=WINDOW,
                    writer_id=name,
                    takeover=True,
                    background=Inline(),
                )
            )
            assert isinstance(writer, RunWriter)
            for seed in seeds:
                number = writer.next_version
                patiently(lambda n=number, s=seed: writer.publish(n, **VERSIONS[s]))  # type: ignore[misc]

    return body


def reader(base: MemoryStore, cache: Path) -> Callable[[MemoryStore], None]:
    """readers: what a reader sees goes forward, and what it fetches is whole."""

    def check_gone(number: int) -> None:
        # A fenced writer that wakes up late can create objects under a number that was retired
        # since: garbage that no manifest names, and that no reader takes for the version.
        found = read_manifest(base, RUN, SigningKeys())
        assert found is not None
        assert found.manifest.entry(number) is None

    def body(store: MemoryStore) -> None:
        following = RunReader(store, RUN)
        for _ in range(4):
            with suppress(NotPublished, StoreUnavailable):
                following.poll()
                if following.manifest is not None and following.manifest.versions:
                    newest = following.manifest.versions[-1]
                    try:
                        fetch_version(store, RUN, newest, cache)
                    except IntegrityError:
                        check_gone(newest.version)

    return body


schedules = st.lists(st.tuples(st.integers(0, 5), fates), max_size=120)


@given(schedule=schedules)
@settings(max_examples=60)
def test_invariants_hold_in_any_interleaving(schedule: list[tuple[int, Fate]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(upload, "IN_ORDER_BYTES", 0)  # one thread per client
        base = MemoryStore()
        history = History(base)
        clients = [
            Client(base, publisher("first", [1, 2, 3, 4])),
            Client(base, publisher("second", [11, 12, 13])),
            *(Client(base, reader(base, Path(folder) / str(number))) for number in range(3)),
            Client(base, collector(RUN)),
        ]
        for choice, fate in schedule:
            alive = [client for client in clients if not client.finished]
            if not alive:
                break
            alive[choice % len(alive)].step(fate)
            history.check()
        for client in clients:  # whoever is left comes to its end undisturbed
            while not client.finished:
                client.step(Fate.GO)
                history.check()
        assert [client.fault for client in clients if client.fault] == []
        check_no_garbage(base)


def check_no_garbage(base: MemoryStore) -> None:
    """no garbage: after a clean-up only what the manifest names is left, up to its latest."""
    found = read_manifest(base, RUN, SigningKeys())
    if found is None:
        return
    collect(base, RUN, older_than_s=-5)
    named = {entry.version for entry in found.manifest.versions}
    for key in base.list(f"runs/{RUN}/adapters/"):
        number = int(key.split("/")[3][1:])
        assert number in named or number > found.manifest.latest


def test_without_conditional_writes_the_newer_claim_wins_in_the_end() -> None:
    """The window that is left: an older writer that slept between its check and its write."""
    base = MemoryStore(conditional_writes=False)

    def claim(store: MemoryStore, name: str) -> RunWriter:
        return RunWriter.claim(store, RUN, base_model=BASE, window=2, writer_id=name, takeover=True)

    heirs: list[RunWriter] = []

    def takeover(phase: str, name: str, key: str) -> None:
        if (phase, name) == ("before", "replace-unchecked") and not heirs and armed:
            heirs.append(claim(base, "heir"))
            heirs[0].publish(5, **VERSIONS[5])

    armed: list[bool] = []
    old = claim(base.view(takeover), "old")
    armed.append(True)
    with pytest.raises(FencedError):
        old.publish(1, **VERSIONS[1])
    late = read_manifest(base, RUN, SigningKeys())
    assert late is not None
    assert late.manifest.writer.id == "old"  # the late write is there …
    follower = RunReader(base, RUN)
    heirs[0].publish(6, **VERSIONS[6])
    manifest = follower.poll()
    assert manifest is not None
    assert manifest.writer.id == "heir"  # … until the owner's next publish
    assert [entry.version for entry in manifest.versions] == [5, 6]
    with pytest.raises(FencedError):
        old.publish(7, **VERSIONS[7])


def test_without_conditional_writes_one_claim_of_an_epoch_wins() -> None:
    base = MemoryStore(conditional_writes=False)
    writers: list[RunWriter] = []

    def race(phase: str, name: str, key: str) -> None:
        if (phase, name) == ("before", "list") and "epochs" in key and not writers:
            writers.append(
                RunWriter.claim(base, RUN, base_model=BASE, window=2, writer_id="b", takeover=True)
            )

    with suppress(FencedError):
        writers.append(
            RunWriter.claim(
                base.view(race), RUN, base_model=BASE, window=2, writer_id="a", takeover=True
            )
        )
    able = []
    for number, writer in enumerate(writers, start=1):
        with suppress(FencedError):
            writer.publish(number, **VERSIONS[number])
            able.append(writer)
    assert len(able) == 1

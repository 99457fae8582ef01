"""Publishers that are killed, or put to sleep, at every step, watched by a concurrent reader."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapter_bucket.errors import FencedError, NotPublished
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.lifecycle import collect
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.adapters import BASE, version
from tests.s3_servers import S3Server

ROOT = Path(__file__).parents[2]
RUN = "run-1"


@dataclass(frozen=True)
class Bucket:
    """A bucket that several processes can open."""

    url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    step: int = 1
    """1 kills at every point; a slower store takes every n-th."""


@pytest.fixture(params=["file", "seaweed", "seaweed_tls", "ministack"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    if request.param == "file":
        return Bucket((tmp_path / "bucket").as_uri())
    server: S3Server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    step = {"seaweed": 1, "ministack": 3, "seaweed_tls": 5}[request.param]
    return Bucket(server.url(server.new_bucket(), "p"), server.environment, step)


def python(bucket: Bucket, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, **bucket.environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Watcher:
    """Polls and fetches all the time, and remembers what must never change."""

    def __init__(self, store: Store, cache: Path) -> None:
        self._store = store
        self._cache = cache
        self._digests: dict[int, str] = {}
        self.polls = 0
        self.fetched: set[int] = set()

    def look(self, reader: RunReader) -> None:
        try:
            manifest = reader.poll()
        except NotPublished:
            return
        self.polls += 1
        if manifest is None:
            return
        for entry in manifest.versions:
            digest = self._digests.setdefault(entry.version, entry.weights.sha256)
            assert digest == entry.weights.sha256, f"version {entry.version} has two contents"
        try:
            fetch_version(self._store, RUN, manifest.versions[-1], self._cache)
            self.fetched.add(manifest.latest)
        except (NotPublished, IndexError):
            # Fell out of retention between poll and fetch; anything torn is an IntegrityError.
            pass


@contextmanager
def watched(store: Store, cache: Path) -> Iterator[Watcher]:
    """Run a watcher beside the body; what it saw wrong fails the test."""
    watcher, stop, faults = Watcher(store, cache), threading.Event(), list[BaseException]()

    def run() -> None:
        reader = RunReader(store, RUN)
        try:
            while not stop.is_set():
                watcher.look(reader)
                time.sleep(0.002)
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


def test_a_publisher_killed_at_any_write_leaves_a_whole_run(bucket: Bucket, tmp_path: Path) -> None:
    store = open_store(bucket.url)
    with watched(store, tmp_path / "cache") as watcher:
        script = str(ROOT / "tests/contract/crashing_publisher.py")
        with python(bucket, script, bucket.url, RUN, str(bucket.step)) as process:
            assert process.stdout is not None
            lines = [json.loads(line) for line in process.stdout]
    assert "came_through" in lines[-1]
    # The two files travel in parallel: either may be the one that is written last.
    died = {
        line["died"].split("/")[0].replace(" runs", " ")
        + line["died"].rpartition("/")[2].replace("model.safetensors", "config.json")
        for line in lines[:-1]
    }
    if bucket.step == 1:
        # claim, two files, the manifest, the end: all of them, before and after.
        for write in (
            "create manifest.json",
            "create adapter_config.json",
            "replace manifest.json",
        ):
            assert {f"before {write}", f"after {write}"} <= died
        # Deletions run beside the end of the run, so which of their points is met is by chance.
        assert any("delete" in point for point in died)
    assert watcher.fetched
    manifest = RunReader(store, RUN).poll()
    assert manifest is not None
    assert manifest.state is RunState.FINISHED
    for entry in manifest.versions:
        fetch_version(store, RUN, entry, tmp_path / "after")
    collect(store, RUN, older_than_s=-5)
    left = {int(key.split("/")[3][1:]) for key in store.list(f"runs/{RUN}/adapters/")}
    assert left == {entry.version for entry in manifest.versions}


SLEEPER = f"""
import sys
from adapter_bucket.errors import FencedError
from adapter_bucket.publish import RunWriter
from adapter_bucket.stores import open_store
from tests.adapters import BASE, version

writer = RunWriter.claim(
    open_store(sys.argv[1]), {RUN!r}, base_model=BASE, window=2, writer_id="sleeper"
)
number = 0
print("claimed", flush=True)
try:
    while True:
        number += 1
        writer.publish(number, **version(number))
        print(number, flush=True)
except FencedError as error:
    print("fenced", error, flush=True)
"""


def test_a_writer_that_slept_through_a_takeover_cannot_publish(
    bucket: Bucket, tmp_path: Path
) -> None:
    store = open_store(bucket.url)
    with python(bucket, "-c", SLEEPER, bucket.url) as process:
        assert process.stdout is not None
        try:
            for expected in ("claimed", "1", "2"):
                assert process.stdout.readline().strip() == expected
            # Somewhere inside a publish: wherever that is.
            os.kill(process.pid, signal.SIGSTOP)
            with watched(store, tmp_path / "cache"):
                writer = RunWriter.claim(
                    store, RUN, base_model=BASE, window=2, writer_id="heir", takeover=True
                )
                first = writer.next_version
                writer.publish(first, **version(500))
                os.kill(process.pid, signal.SIGCONT)
                rest = process.stdout.read()
                writer.publish(first + 1, **version(501))
        finally:
            process.kill()
    assert "fenced" in rest
    assert "'heir'" in rest
    manifest = RunReader(store, RUN).poll()
    assert manifest is not None
    assert manifest.writer.id == "heir"
    assert [entry.version for entry in manifest.versions][-2:] == [first, first + 1]
    assert manifest.entry(first) is not None


def test_two_writers_never_both_win(bucket: Bucket) -> None:
    opened: Callable[[], Store] = lambda: open_store(bucket.url)  # noqa: E731
    first = RunWriter.claim(opened(), RUN, base_model=BASE, window=2, writer_id="first")
    second = RunWriter.claim(
        opened(), RUN, base_model=BASE, window=2, writer_id="second", takeover=True
    )
    third = RunWriter.claim(
        opened(), RUN, base_model=BASE, window=2, writer_id="third", takeover=True
    )
    for loser in (first, second):
        with pytest.raises(FencedError, match="'third'"):
            loser.publish(1, **version(1))
    third.publish(third.next_version + 1, **version(3))

"""Faults between us and a real store: state stays right, and work goes on when they end."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from adapter_bucket.errors import (
    ConfigError,
    IntegrityError,
    StoreDenied,
    StoreUnavailable,
)
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.s3_settings import make_client
from adapter_bucket.s3_store import S3Store
from tests.adapters import BASE, version
from tests.faults.store_proxy import FaultProxy, Faults
from tests.s3_servers import S3Server, ministack, seaweed, seaweed_pair

__all__ = ["ministack", "seaweed", "seaweed_pair"]

RUN = "run-1"
BIG = {"width": 2000, "layers": 1, "rank": 4}
"""Options of an adapter of 64 KB: more than one packet."""


@pytest.fixture
def proxy(seaweed: S3Server) -> Iterator[FaultProxy]:
    parts = urlsplit(seaweed.endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = FaultProxy((parts.hostname, parts.port))
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(seaweed: S3Server) -> str:
    return seaweed.new_bucket()


DEADLINE_S, READ_S = 3.0, 0.7


def through(proxy: FaultProxy, server: S3Server, bucket: str, **options: object) -> S3Store:
    given = {
        "endpoint_url": proxy.endpoint,
        "read_timeout_s": READ_S,
        "connect_timeout_s": READ_S,
        "conditional_writes": "yes",
    }
    return S3Store(server.settings(bucket, **{**given, **options}))


@pytest.fixture
def store(seaweed: S3Server, proxy: FaultProxy, bucket: str) -> S3Store:
    return through(proxy, seaweed, bucket)


def claim(store: S3Store) -> RunWriter:
    return RunWriter.claim(store, RUN, base_model=BASE, window=2, writer_id="w", takeover=True)


PASSING = {
    "a 503 storm": Faults(answer="SlowDown", limit=4),
    "connections reset before the answer": Faults(reset_after=0, limit=3),
    "connections reset within the answer": Faults(reset_after=40, limit=3),
    "bodies cut short": Faults(close_after=300, limit=2),
    "200 ms latency": Faults(latency_s=0.2),
    "a stall within the body": Faults(stall_after=300, limit=1),
    "2 s latency, once": Faults(latency_s=2.0, limit=1),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_costs_time_only(
    store: S3Store, proxy: FaultProxy, tmp_path: Path, name: str
) -> None:
    writer, reader = claim(store), RunReader(store, RUN)
    with proxy.failing(PASSING[name]):
        entry = writer.publish(1, **version(1, **BIG))
        assert proxy.requests > 0
    with proxy.failing(PASSING[name]):
        manifest = reader.poll()
        assert manifest is not None
        assert manifest.versions == [entry]
    with proxy.failing(PASSING[name]):
        folder = fetch_version(store, RUN, entry, tmp_path)
    assert (folder / "adapter_model.safetensors").read_bytes() == version(1, **BIG)["weights"]
    writer.publish(2, **version(2))
    writer.close(RunState.FINISHED)


LASTING = {
    "503 for ever": Faults(answer="SlowDown"),
    "stalled": Faults(stall_after=0),
    "reset": Faults(reset_after=0),
    "2 s latency": Faults(latency_s=2.0),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_lasting_fault_is_given_up_within_the_deadline_and_healed_after_it(
    seaweed: S3Server, bucket: str, proxy: FaultProxy, name: str
) -> None:
    store = through(proxy, seaweed, bucket, deadline_s=DEADLINE_S)
    writer, reader = claim(store), RunReader(store, RUN)
    reader.poll()
    with proxy.failing(LASTING[name]):
        for call in (lambda: writer.publish(1, **version(1)), reader.poll):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            # Deadline, one read timeout, and what a busy machine adds.
            assert time.monotonic() - started < DEADLINE_S + READ_S + 4.0
        assert reader.manifest is not None
    # Whatever arrived of the lost attempts: the same call ends in exactly one version.
    entry = writer.publish(1, **version(1))
    manifest = reader.poll() or reader.manifest
    assert manifest is not None
    assert manifest.versions == [entry]
    assert manifest.latest == 1


def test_a_commit_whose_answer_was_lost_is_not_taken_for_another_writer(
    store: S3Store, proxy: FaultProxy, bucket: str, seaweed: S3Server
) -> None:
    writer = claim(store)
    direct = RunReader(S3Store(seaweed.settings(bucket)), RUN)
    for number in range(1, 4):
        with proxy.failing(Faults(reset_after=0, limit=3)):
            writer.publish(number, **version(number))
        manifest = direct.poll()
        assert manifest is not None
        assert manifest.latest == number


def test_a_body_that_was_changed_on_the_way_is_never_kept(
    store: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    entry = claim(store).publish(1, **version(1, **BIG))
    with (
        proxy.failing(Faults(flip_at=20_000)),
        pytest.raises(IntegrityError, match="sha256"),
    ):
        fetch_version(store, RUN, entry, tmp_path)
    assert list((tmp_path / RUN).iterdir()) == []
    assert fetch_version(store, RUN, entry, tmp_path).is_dir()


def test_a_deleted_bucket_is_an_outage_and_a_new_one_heals_it(ministack: S3Server) -> None:
    bucket = ministack.new_bucket()
    store = S3Store(ministack.settings(bucket))
    writer, reader = claim(store), RunReader(store, RUN)
    reader.poll()
    admin = make_client(ministack.settings(bucket))
    for key in list(store.list("")):
        admin.delete_object(Bucket=bucket, Key=key)
    admin.delete_bucket(Bucket=bucket)
    for call in (lambda: writer.publish(1, **version(1)), reader.poll):
        with pytest.raises(StoreUnavailable, match="does not exist"):
            call()
    with pytest.raises(ConfigError, match="does not exist"):  # at start it is a wrong setting
        _open(ministack, bucket)
    admin.create_bucket(Bucket=bucket)
    claim(store).publish(1, **version(1))
    assert RunReader(store, RUN).poll() is not None


def _open(server: S3Server, bucket: str) -> S3Store:
    return S3Store.open(
        server.url(bucket), access_key_id=server.access_key, secret_access_key=server.secret_key
    )


def test_wrong_credentials_are_fatal_at_once(seaweed: S3Server, bucket: str) -> None:
    store = S3Store(seaweed.settings(bucket, secret_access_key="wrong"))
    started = time.monotonic()
    with pytest.raises(StoreDenied, match="credentials"):
        store.get("runs/r/manifest.json")
    assert time.monotonic() - started < 5


def test_expired_credentials_are_fatal_at_once(store: S3Store, proxy: FaultProxy) -> None:
    claim(store)
    with proxy.failing(Faults(answer="ExpiredToken")):
        started = time.monotonic()
        with pytest.raises(StoreDenied, match="expired"):
            store.get(f"runs/{RUN}/manifest.json")
        assert time.monotonic() - started < 3
        assert proxy.requests == 1
    assert RunReader(store, RUN).poll() is not None


def test_expired_credentials_that_were_renewed_are_picked_up(
    seaweed: S3Server, bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(S3Store(seaweed.settings(bucket)))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "expired")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    store = through(proxy, seaweed, bucket, access_key_id=None, secret_access_key=None)
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    with proxy.failing(Faults(answer="ExpiredToken", limit=1)):
        assert RunReader(store, RUN).poll() is not None


class FullDisk:
    """A store whose downloads meet a full local disk, as long as ``full`` is set."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self.full = True

    @property
    def url(self) -> str:
        return self._store.url

    def download(self, key: str, path: Path, *, size: int) -> None:
        if self.full:
            os.symlink("/dev/full", path)
            with path.open("wb", buffering=0) as file:
                file.write(b"x")
        self._store.download(key, path, size=size)


def test_a_full_disk_on_the_reader_leaves_nothing_and_heals(store: S3Store, tmp_path: Path) -> None:
    entry = claim(store).publish(1, **version(1))
    disk = FullDisk(store)
    with pytest.raises(StoreUnavailable, match=os.strerror(errno.ENOSPC)):
        fetch_version(disk, RUN, entry, tmp_path)  # type: ignore[arg-type]
    assert list((tmp_path / RUN).iterdir()) == []
    disk.full = False
    assert fetch_version(disk, RUN, entry, tmp_path).is_dir()  # type: ignore[arg-type]

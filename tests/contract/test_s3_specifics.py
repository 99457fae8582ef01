"""What only S3 has: parts, payloads without copies, capabilities, bounded retries."""

from __future__ import annotations

import logging
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from adapter_bucket import capabilities, s3_settings
from adapter_bucket.capabilities import Capabilities, prepare_writer, probe
from adapter_bucket.errors import IntegrityError, ObjectNotFound, PreconditionFailed
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.s3_settings import S3Settings, make_client
from adapter_bucket.s3_store import S3Store
from adapter_bucket.store import StoredObject
from tests.s3_servers import S3Server

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MIB = 1024**2
KEY = "runs/r/adapters/v00000001/adapter_model.safetensors"


@pytest.fixture
def in_parts(s3_server: S3Server) -> S3Store:
    """A store that sends from 10 MiB on in parts of 5 MiB."""
    return S3Store(
        s3_server.settings(s3_server.new_bucket(), multipart_bytes=10 * MIB, part_bytes=5 * MIB)
    )


def test_large_objects_travel_in_parts_both_ways(in_parts: S3Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * (12 * MIB // 256) + b"the end"
    etag = in_parts.create(KEY, memoryview(data))
    assert etag.strip('"').endswith("-3")  # S3 marks an object of three parts so
    in_parts.download(KEY, tmp_path / "file", size=len(data))
    assert (tmp_path / "file").read_bytes() == data
    with pytest.raises(IntegrityError):
        in_parts.download(KEY, tmp_path / "other", size=len(data) + 1)
    with pytest.raises(ObjectNotFound):
        in_parts.download(KEY + "x", tmp_path / "none", size=len(data))
    assert list(in_parts.list("")) == [KEY]


def test_an_upload_in_parts_never_overwrites_and_leaves_no_parts(in_parts: S3Store) -> None:
    in_parts.create(KEY, b"first")
    with pytest.raises(PreconditionFailed):
        in_parts.create(KEY, b"x" * (11 * MIB))
    found = in_parts.get(KEY)
    assert isinstance(found, StoredObject)
    assert found.data == b"first"
    assert in_parts.sweep("", older_than_s=-60) == 0


def test_uploads_that_were_never_completed_are_swept(in_parts: S3Store) -> None:
    client = make_client(in_parts.settings)
    client.create_multipart_upload(Bucket=in_parts.settings.bucket, Key=KEY)
    assert in_parts.sweep("runs/", older_than_s=3600) == 0
    assert in_parts.sweep("runs/", older_than_s=-60) == 1


def test_a_payload_is_not_copied(seaweed_tls: S3Server) -> None:
    # Over TLS the body is not hashed for the signature; the send buffers are small.
    store = S3Store(seaweed_tls.settings(seaweed_tls.new_bucket()))
    data = memoryview(bytearray(16 * MIB))
    store.create("warm-up", b"x")
    tracemalloc.start()
    try:
        store.create(KEY, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB


def test_a_good_store_has_every_capability(s3_server: S3Server) -> None:
    store = S3Store(s3_server.settings(s3_server.new_bucket()))
    found = probe(store)
    assert found.consequences() == []
    assert found.conditional_writes
    assert found.clock_skew_s is not None
    assert abs(found.clock_skew_s) < 30
    assert list(store.list("")) == []


def test_a_store_without_conditions_is_reported_once_with_the_consequence(
    seaweed: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = seaweed.settings(seaweed.new_bucket())
    poor = Capabilities(False, False, False, True, True, False, 120.0)
    probed: list[object] = []

    def once(store: object) -> Capabilities:
        probed.append(store)
        return poor

    monkeypatch.setattr(capabilities, "probe", once)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        store = S3Store(settings)
        prepare_writer(store)
        assert not store.conditional_writes
    assert len(probed) == 1
    texts = [record.getMessage() for record in caplog.records if record.name.endswith("ities")]
    assert len(texts) == 4
    assert any("only one trainer" in text for text in texts)


def test_a_probe_tells_a_store_that_ignores_conditions() -> None:
    assert not probe(MemoryStore(conditional_writes=False)).conditional_writes


def test_read_check_write_still_refuses_what_it_sees(s3_server: S3Server) -> None:
    store = S3Store(s3_server.settings(s3_server.new_bucket(), conditional_writes="no"))
    etag = store.create(KEY, b"one")
    with pytest.raises(PreconditionFailed):
        store.create(KEY, b"two")
    second = store.replace(KEY, b"two", etag=etag)
    with pytest.raises(PreconditionFailed):
        store.replace(KEY, b"three", etag=etag)
    store.delete([KEY])
    with pytest.raises(PreconditionFailed):
        store.replace(KEY, b"three", etag=second)


def test_a_body_follows_its_headers_at_once(s3_server: S3Server) -> None:
    # Fails once boto3 does not add the header any more; `_send_body_at_once` can go then.
    settings = s3_server.settings(s3_server.new_bucket())
    ours, theirs = make_client(settings), make_client(settings)
    theirs.meta.events.unregister("before-call.s3", s3_settings._send_body_at_once)
    assert _expects(theirs, settings.bucket)
    assert not _expects(ours, settings.bucket)


def _expects(client: S3Client, bucket: str) -> bool:
    """Whether a put asks the server before it sends its body."""
    seen: list[bool] = []
    client.meta.events.register(
        "before-send.s3.PutObject", lambda request, **_: seen.append("Expect" in request.headers)
    )
    client.put_object(Bucket=bucket, Key=KEY, Body=b"x")
    return seen == [True]


def test_a_large_put_of_an_existing_key_is_refused_and_not_taken_for_an_outage(
    s3_server: S3Server,
) -> None:
    store = S3Store(s3_server.settings(s3_server.new_bucket(), deadline_s=10.0))
    store.create(KEY, b"first")
    with pytest.raises(PreconditionFailed):
        store.create(KEY, memoryview(bytearray(24 * MIB)))
    found = store.get(KEY)
    assert isinstance(found, StoredObject)
    assert found.data == b"first"


def test_a_refusal_before_the_body_is_read_is_heard() -> None:
    # The real servers read a body before they refuse it; this one closes, with the body unread.
    refusal = b"HTTP/1.1 412 Precondition Failed\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    class Refusing(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(refusal)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        settings = S3Settings(
            "bucket",
            endpoint_url=f"http://127.0.0.1:{port}",
            access_key_id="a",
            secret_access_key="b",
            deadline_s=10.0,
        )
        try:
            for _ in range(5):
                with pytest.raises(PreconditionFailed):
                    S3Store(settings).create(KEY, memoryview(bytearray(24 * MIB)))
        finally:
            server.shutdown()


DYING = """
import os, signal, sys
from pathlib import Path
from adapter_bucket import s3_transfer
from adapter_bucket.stores import open_store

store = open_store(sys.argv[1])
etag = store.create("key", b"whole")


class Dying(s3_transfer.ViewBody):
    def readinto(self, buffer):
        os.kill(os.getpid(), signal.SIGKILL)


s3_store = sys.modules["adapter_bucket.s3_store"]
s3_store.body_of = Dying
store.replace("key", b"x" * 3000, etag=etag)
"""


def test_a_put_that_dies_within_its_body_stores_nothing(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    process = subprocess.run(
        [sys.executable, "-c", DYING, s3_server.url(bucket)],
        env={**os.environ, **s3_server.environment},
        timeout=60,
    )
    assert process.returncode == -signal.SIGKILL
    time.sleep(0.5)  # a store that keeps the torso does it once it noticed the end
    found = S3Store(s3_server.settings(bucket)).get("key")
    assert isinstance(found, StoredObject)
    assert found.data == b"whole"

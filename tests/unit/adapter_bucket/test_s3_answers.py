"""Answers that are none of S3's: of a load balancer, a captive portal, a store that pages badly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from adapter_bucket.capabilities import probe
from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.s3_settings import S3Settings
from adapter_bucket.s3_store import S3Store


@contextmanager
def answering(body: Callable[[int], bytes]) -> Iterator[S3Store]:
    """A store whose endpoint answers 200 with ``body(number of the request)``."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            nonlocal count
            count += 1
            data = body(count)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        settings = S3Settings(
            "bucket",
            endpoint_url=f"http://127.0.0.1:{server.server_address[1]}",
            access_key_id="a",
            secret_access_key="b",
            max_attempts=1,
            multipart_bytes=5 * 1024**2,
            part_bytes=5 * 1024**2,
        )
        try:
            yield S3Store(settings)
        finally:
            server.shutdown()


CALLS: dict[str, Callable[[S3Store], object]] = {
    "list": lambda store: list(store.list("runs/")),
    "list_dirs": lambda store: list(store.list_dirs("runs/")),
    "get": lambda store: store.get("runs/a/manifest.json"),
    "create": lambda store: store.create("runs/a/x", b"1"),
    "create in parts": lambda store: store.create("runs/a/x", bytes(5 * 1024**2)),
}


@pytest.mark.parametrize("body", [b"<html>sign in<br></html>", b"<html>sign in</html>", b"", b"OK"])
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_not_s3s_is_an_outage(call: str, body: bytes) -> None:
    with answering(lambda _: body) as store, pytest.raises(StoreUnavailable):
        CALLS[call](store)


PAGE = (
    "<ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated>{token}"
    "<Contents><Key>runs/a</Key><Size>1</Size>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
)


@pytest.mark.parametrize("token", ["", "<NextContinuationToken>one</NextContinuationToken>"])
def test_a_listing_that_does_not_go_on_is_not_taken_for_whole_and_ends(token: str) -> None:
    page = PAGE.format(token=token).encode()
    with (
        answering(lambda _: page) as store,
        pytest.raises(StoreUnavailable, match="does not go on"),
    ):
        list(store.list("runs/"))


def test_an_outage_while_it_is_probed_says_nothing_of_a_store() -> None:
    """Else a writer would go without conditional writes for as long as it lives."""
    created = 0

    def fail(phase: str, call: str, key: str) -> None:
        nonlocal created
        if (phase, call) == ("before", "create"):
            created += 1
            if created == 2:
                raise StoreUnavailable("503 Slow Down, eight times")

    with pytest.raises(StoreUnavailable, match="Slow Down"):
        probe(MemoryStore(hook=fail))
    assert probe(MemoryStore()).conditional_writes

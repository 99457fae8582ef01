"""Links pass everything on unchanged, and fail as told."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import requests

from tests.faults.matrix.links import Answer, HttpLink, Network, Observer, RawLink, Request
from tests.faults.matrix.moments import Moments, phase_of

WEIGHTS = "/b/runs/r/adapters/v00000003/adapter_model.safetensors"


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if len(body) == int(self.headers["content-length"]):
            self.server.bodies.append(body)  # type: ignore[attr-defined]
        with suppress(OSError):  # the client may be gone: that is tried here
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture
def echo() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.bodies = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Seeing(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes]] = []

    def answered(self, link: HttpLink, request: Request, answer: Answer) -> None:
        self.seen.append((request.body, answer.body))


def put(link: RawLink, body: bytes, path: str = "/x", timeout_s: float = 5) -> requests.Response:
    with requests.Session() as session:
        return session.put(f"http://127.0.0.1:{link.port}{path}", data=body, timeout=timeout_s)


def test_what_passes_is_seen_and_unchanged(
    network: Network, echo: http.server.ThreadingHTTPServer
) -> None:
    seeing = Seeing()
    link = HttpLink(network, "a-b", echo.server_port, seeing)
    body = bytes(range(256)) * 1000
    assert put(link, body).content == body
    assert seeing.seen == [(body, body)]


def test_a_cut_lets_nothing_pass_and_resets_at_its_end(
    network: Network, echo: http.server.ThreadingHTTPServer
) -> None:
    for link in (HttpLink(network, "a-b", echo.server_port), RawLink(network, echo.server_port)):
        link.cut()
        with pytest.raises(requests.Timeout):
            put(link, b"x", timeout_s=0.5)
        threading.Timer(1.5, link.mend).start()
        with pytest.raises(requests.ConnectionError):
            put(link, b"x")
        assert put(link, b"y").content == b"y"
    assert b"x" not in echo.bodies  # type: ignore[attr-defined]


def test_latency_and_refusals(network: Network, echo: http.server.ThreadingHTTPServer) -> None:
    link = HttpLink(network, "a-b", echo.server_port)
    link.latency_s = 0.3
    begun = time.monotonic()
    assert put(link, b"x").content == b"x"
    assert time.monotonic() - begun >= 0.3
    link.refuse = lambda _request: Answer(503, [(b"content-length", b"2")], b"no")
    assert put(link, b"z").status_code == 503
    assert echo.bodies == [b"x"]  # type: ignore[attr-defined]


def test_a_request_is_held_half_sent_and_never_completed_for_a_client_that_died(
    network: Network, echo: http.server.ThreadingHTTPServer
) -> None:
    moments = Moments()

    class Holding(Observer):
        async def passing(self, link: HttpLink, request: Request) -> None:
            await moments.passing(link, request)

    link = HttpLink(network, "trainer-store", echo.server_port, Holding())
    moments.arm("publish")
    with pytest.raises(requests.Timeout):
        put(link, b"x" * 1000, WEIGHTS, timeout_s=0.5)
    moments.wait()
    moments.release()
    assert put(link, b"y", WEIGHTS).content == b"y"
    assert echo.bodies == [b"y"]  # type: ignore[attr-defined]


def test_phases_are_told_by_what_is_asked_for() -> None:
    def phase(link: str, method: str, path: str) -> str | None:
        return phase_of(link, Request(method, path, [], b""))

    checkpoint = "/b/runs/r/checkpoints/checkpoint-6/e1/optimizer.pt"
    assert phase("trainer-store", "PUT", WEIGHTS) == "publish"
    assert phase("trainer-store", "PUT", checkpoint) == "checkpoint"
    assert phase("trainer-store", "GET", checkpoint) is None
    assert phase("replica-1-store", "GET", WEIGHTS) == "load"
    assert phase("replica-2-store", "GET", WEIGHTS) is None
    assert phase("proxy-replica-1", "POST", "/v1/completions") == "generation"

"""Whatever a client tries, a server with all its routes open sees only what is on the proxy's list.

The proof is vLLM's own access log.
"""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.integration.plugin.server import wait_until
from tests.integration.proxy.conftest import CLIENT_TOKEN, REPLICA_TOKEN, Gateway
from tests.integration.proxy.raw_client import ANSWER_S, statuses

pytestmark = pytest.mark.slow

WATCHED = {"GET /health", "GET /bucket_lora/status", "GET /v1/models", "GET /metrics"}
"""What the proxy asks by itself."""
LISTED = {
    "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize",
    "GET /server_info", "GET /get_world_size",
}  # fmt: skip
OWN = {"GET /health", "GET /v1/models", "GET /metrics"}
"""Routes of vLLM's that the proxy answers itself."""

EXTRAS = (
    "/collective_rpc", "/pause", "/resume", "/sleep", "/wake_up", "/is_sleeping", "/docs",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/start_profile",
    "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/init_weight_transfer",
    "/update_weights", "/openapi.json", "/redoc", "/load", "/version", "/ping", "/invocations",
    "/v1/embeddings", "/inference/v1/generate", "/scale_elastic_ep", "/v1/responses", "/",
    "/proxy", "/v1", "/admin", "/.env", "/v1/completions/render",
)  # fmt: skip
DANGEROUS = {"/collective_rpc", "/pause", "/v1/load_lora_adapter", "/sleep"}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")

GENERATION_S = 30.0
"""Limit of a generation on a busy machine."""

GENERATED = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
COUNT = 128
"""Completions of a request that is to last for seconds: four take half a second."""

LOGIN = f"authorization: Bearer {CLIENT_TOKEN}\r\n".encode()
SMUGGLED = b"POST /pause HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


def generation(gateway: Gateway, **more: object) -> bytes:
    fields = {"model": gateway.model, "prompt": [72, 101, 108], "max_tokens": 2, **more}
    return json.dumps(fields).encode()


def request(body: bytes, *lines: bytes, target: bytes = b"/v1/completions") -> bytes:
    first = b"POST " + target + b" HTTP/1.1"
    fields = [b"host: x", b"content-type: application/json", LOGIN.strip(), *lines]
    return b"\r\n".join([first, *fields]) + b"\r\n\r\n" + body


def assert_nothing_passed(gateway: Gateway) -> None:
    passed = set(gateway.reached()) - WATCHED - LISTED
    assert not passed, passed


def test_no_route_passes_that_is_not_on_the_list(gateway: Gateway) -> None:
    described = json.loads(gateway.direct("/openapi.json"))["paths"]
    assert set(described) >= DANGEROUS, "the server is not as open as it should be"
    answers = {}
    for path in sorted({*described, *EXTRAS}):
        concrete = path.replace("{", "").replace("}", "")
        for method in METHODS:
            assert gateway.raw().exchange(method, concrete)[0] == 401, (method, path)
            assert gateway.raw().exchange(method, concrete, "authorization: Bearer no")[0] == 401
            answers[f"{method} {path}"] = gateway.ask(method, concrete)[0]
    forbidden = {route for route, status in answers.items() if status in (403, 405)}
    served = {route.replace("HEAD", "GET") for route in set(answers) - forbidden}
    assert served <= LISTED | OWN | {"GET /bucket_lora/status", "GET /"}, served
    assert served >= OWN
    assert_nothing_passed(gateway)


def test_the_way_through_works(gateway: Gateway) -> None:
    status, body = gateway.ask("POST", "/v1/completions", body=generation(gateway))
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)


def hostile(gateway: Gateway) -> dict[str, bytes]:
    """Requests of which vLLM must see at most one generation."""
    body = generation(gateway)
    length = b"content-length: %d" % len(body)
    chunked = b"transfer-encoding: chunked"
    piece = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    plain = request(body, length)
    return {
        "length and chunks": request(piece + SMUGGLED, length, chunked),
        "chunks and length": request(piece + SMUGGLED, chunked, length),
        "chunks twice": request(piece + SMUGGLED, chunked, chunked),
        "two lengths": request(body + SMUGGLED, length, b"content-length: 0"),
        "length as list": request(body + SMUGGLED, length + b", 0"),
        "signed length": request(body + SMUGGLED, length.replace(b": ", b": +")),
        "hex length": request(body + SMUGGLED, b"content-length: 0x10"),
        "huge length": request(body, b"content-length: 99999999999999999999999"),
        "unknown coding": request(piece + SMUGGLED, b"transfer-encoding: gzip, chunked"),
        "hidden coding": request(piece + SMUGGLED, b"transfer-encoding:\x0bchunked"),
        "coding in 1.0": request(piece + SMUGGLED, chunked).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        "names credentials hop-by-hop": request(body, length, b"connection: authorization"),
        "names framing hop-by-hop": request(body, length, b"connection: content-length, host"),
        "two hosts": request(body, length, b"host: evil.example"),
        "no host": plain.replace(b"host: x\r\n", b""),
        "two credentials": request(body, length, b"authorization: Bearer other"),
        "folded": request(body, b"x-a: b\r\n " + length, length),
        "bare LF in a field": request(body, length, b"x-a: b\nx-c: d"),
        "bare CR in a field": request(body, length, b"x-a: b\rx-c: d"),
        "bare LF everywhere": plain.replace(b"\r\n", b"\n"),
        "NUL": request(body, length, b"x-a: \x00"),
        "space before colon": request(body + SMUGGLED, length.replace(b":", b" :")),
        "pipelined without token": plain + SMUGGLED,
        "pipelined with token": plain + SMUGGLED.replace(b"host", LOGIN + b"host"),
        "forwarded as someone": request(
            body, length, b"x-forwarded-for: 127.0.0.1", b"x-original-url: /pause",
            b"x-rewrite-url: /pause", b"x-http-method-override: DELETE",
        ),
        "expects": request(body, length, b"expect: 100-continue"),
        "upgrade": request(body, length, b"connection: upgrade", b"upgrade: h2c"),
        "h2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        "negative chunk": request(b"-1\r\n" + body, chunked),
        "chunk with huge size": request(b"ffffffffffffffffff\r\n" + body, chunked),
    }  # fmt: skip


TARGETS = (
    b"/%70ause", b"/%2570ause", b"/v1/completions/../../pause", b"/v1/completions/%2e%2e/pause",
    b"/v1/completions/..%2f..%2fpause", b"/v1/completions%2f..%2f..%2fpause", b"//pause",
    b"/./pause", b"/v1/completions;/pause", b"/v1/completions%00/pause", b"/pause?/v1/completions",
    b"/pause#/v1/completions", b"/pause/", b"/PAUSE", b"\\pause", b"/v1\\..\\pause", b"pause", b"*",
    b"http://127.0.0.1/pause", b"http://x@127.0.0.1/pause", b"/health/../pause", b"/%",
    b"/v1/completions HTTP/1.1\r\nx: y\r\n\r\nPOST /pause", b"/\xff\xfe", b"/" + b"a" * 50_000,
    b"/bucket_lora/status/../../pause", b"/v1/models/%2e%2e/load_lora_adapter", b"/.%2fpause",
)  # fmt: skip


def test_hostile_requests_reach_nothing_but_generations(gateway: Gateway) -> None:
    body = generation(gateway)
    attempts = hostile(gateway)
    for target in TARGETS:
        attempts[f"target {target[:60]!r}"] = request(
            body, b"content-length: %d" % len(body), target=target
        )
    sent, answered, hanging = gateway.reached().count("POST /v1/completions"), 0, []
    open_ = []
    for name, data in attempts.items():
        client = gateway.raw()
        client.write(data)
        open_.append((name, client))
    for name, client in open_:
        if not client.settled(GENERATION_S):
            hanging.append(name)
        got = client.read(quiet_s=0.05)
        answered += statuses(got).count(200)
        assert CLIENT_TOKEN.encode() not in got, name
        assert REPLICA_TOKEN.encode() not in got, name
        client.close()
    assert not hanging
    assert_nothing_passed(gateway)
    assert gateway.reached().count("POST /v1/completions") - sent == answered
    assert answered >= 5, "some of them are valid and must be served"
    assert gateway.ask("POST", "/v1/completions", body=body)[0] == 200
    pause = json.loads(gateway.direct("/is_paused"))
    assert pause == {"is_paused": False}


def test_heads_and_bodies_of_10_mb_are_refused_quickly(gateway: Gateway) -> None:
    large = b"y" * 10_000_000
    began = time.monotonic()
    for data in (
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + large + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x-many: y\r\n" * 900_000 + b"\r\n",
        b"GET /" + large + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        large,
    ):
        with gateway.raw() as client:
            client.write(data)
            assert client.closed()
        assert set(statuses(client.got)) <= {400}, client.got[:200]
        assert client.sent < len(data) or statuses(client.got) == [400]
    garbage = gateway.ask("POST", "/v1/completions", body=large)
    assert garbage[0] == 400
    too_large = request(b"", b"content-length: 100000000")
    with gateway.raw() as client:
        client.write(too_large)
        assert client.settled(ANSWER_S)
    assert statuses(client.got) == [413]
    anonymous = gateway.raw().exchange("POST", "/v1/completions", body=large)
    assert anonymous[0] in (401, 0)  # 0: its connection was reset while it was still sending
    assert time.monotonic() - began < 20
    assert_nothing_passed(gateway)


def test_slow_clients_are_closed_and_hold_nobody_up(gateway: Gateway) -> None:
    for drip in gateway.drips:
        assert drip.closed(25), "a head that never ends keeps its connection"
    slow = [gateway.raw() for _ in range(50)]
    for client in slow:
        client.write(request(b"{", b"content-length: 1000"))
    began = time.monotonic()
    assert gateway.ask("POST", "/v1/completions", body=generation(gateway))[0] == 200
    assert time.monotonic() - began < GENERATION_S / 3
    for client in slow:
        assert client.closed()
        assert statuses(client.got) == [408]
        client.close()


def aborted(gateway: Gateway) -> int:
    """Requests that vLLM's engine client says it has aborted."""
    return len(re.findall(r"Request \S+ aborted", gateway.server_log.read_text(errors="replace")))


def metric(page: bytes, name: str) -> float:
    """Sum of a metric's samples."""
    samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page.decode(), re.MULTILINE)
    assert samples, name
    return sum(float(value) for value in samples)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_request_aborted_in_the_engine(
    gateway: Gateway, stream: bool
) -> None:
    """vLLM counts only what it finishes, so the proof is its log, and tokens it did not make."""
    before, tokens = aborted(gateway), metric(gateway.direct("/metrics"), GENERATED)
    body = generation(gateway, max_tokens=250, ignore_eos=True, n=COUNT, stream=stream)
    with gateway.raw() as client:
        client.write(request(body, b"content-length: %d" % len(body)))
        if stream:
            assert client.read_until(b"data:")
        else:
            wait_until(lambda: metric(gateway.direct("/metrics"), RUNNING) > 0)
    wait_until(lambda: aborted(gateway) > before)
    wait_until(lambda: metric(gateway.direct("/metrics"), RUNNING) == 0)
    assert metric(gateway.direct("/metrics"), GENERATED) - tokens < COUNT * 250
    assert metric(gateway.ask("GET", "/metrics")[1], "bucket_lora_proxy_in_flight") == 0


def test_tokens_are_in_no_log_no_metric_and_no_error(gateway: Gateway) -> None:
    seen = gateway.ask("GET", "/metrics")[1] + gateway.ask("GET", "/bucket_lora/status")[1]
    seen += gateway.ask("GET", "/nowhere")[1] + gateway.ask("POST", "/v1/completions")[1]
    seen += gateway.log.read_bytes()
    for token in (CLIENT_TOKEN, REPLICA_TOKEN):
        assert token.encode() not in seen
    assert CLIENT_TOKEN.encode() not in gateway.server_log.read_bytes()
    assert b"Traceback" not in gateway.log.read_bytes()

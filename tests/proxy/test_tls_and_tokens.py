"""Real TLS on both hops, and bearer tokens that stay on their own side and out of the logs."""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from pathlib import Path

import h11
import pytest
import trustme

from tests.proxy.proxy_harness import Harness
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio

CLIENT_TOKEN = "client-token-0123456789"
SECOND_TOKEN = "client-token-9876543210"
REPLICA_TOKEN = "replica-token-abcdefgh"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


async def test_both_hops_speak_tls(
    harness: Harness,
    authority: trustme.CA,
    server_tls: ssl.SSLContext,
    ca_file: Path,
    tmp_path: Path,
) -> None:
    certificate = authority.issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    certificate.private_key_pem.write_to_path(str(key))
    client_tls = ssl.create_default_context(cafile=ca_file)
    replica = await harness.replica(StandIn(ready={"run-v1"}, tls=server_tls))
    proxy = await harness.proxy(
        replica, tls_cert=cert, tls_key=key, replica_ca=ca_file, client_tls=client_tls
    )
    for _ in range(3):
        assert (await proxy.generate("run-v1")).json()["model"] == "run-v1"


async def test_replicas_and_clients_can_each_be_asked_for_a_certificate(
    harness: Harness, authority: trustme.CA, ca_file: Path, tmp_path: Path
) -> None:
    """Mutual TLS on both hops; without a certificate neither gets through."""
    for name in ("localhost", "proxy-client", "trainer"):
        issued = authority.issue_cert(name)
        issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    demanding = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca_file)
    demanding.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(demanding)
    replica = await harness.replica(StandIn(ready={"run-v1"}, tls=demanding))
    shut_out = await harness.proxy(replica, replica_ca=ca_file, expect_up=0)
    assert (await shut_out.get("/health")).status == 503
    own, served = tmp_path / "proxy-client.pem", tmp_path / "localhost.pem"
    trainer = ssl.create_default_context(cafile=ca_file)
    trainer.load_cert_chain(tmp_path / "trainer.pem")
    proxy = await harness.proxy(
        replica,
        replica_ca=ca_file,
        replica_cert=own,
        replica_key=own,
        tls_cert=served,
        tls_key=served,
        client_ca=ca_file,
        client_tls=trainer,
    )
    assert (await proxy.generate("run-v1")).status == 200
    proxy.client_tls = ssl.create_default_context(cafile=ca_file)
    with pytest.raises((ssl.SSLError, ConnectionError, h11.RemoteProtocolError)):
        await proxy.get("/health")
    stranger = trustme.CA().issue_cert("trainer")
    stranger.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "stranger.pem"))
    proxy.client_tls.load_cert_chain(tmp_path / "stranger.pem")
    with pytest.raises((ssl.SSLError, ConnectionError, h11.RemoteProtocolError)):
        await proxy.get("/health")


async def test_the_development_certificate_is_made_once_and_clients_can_trust_it(
    harness: Harness, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "dev"
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    first = await harness.proxy(replica, dev_cert=folder)
    made = (folder / "cert.pem").read_bytes()
    assert (folder / "cert-and-key.pem").stat().st_mode & 0o077 == 0
    assert b"PRIVATE" not in made
    first.client_tls = ssl.create_default_context(cafile=folder / "cert.pem")
    first.client_tls.verify_flags |= ssl.VERIFY_X509_STRICT
    assert (await first.generate("run-v1")).status == 200
    first.client_tls = ssl.create_default_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        await first.generate("run-v1")
    second = await harness.proxy(replica, dev_cert=folder)
    assert (folder / "cert.pem").read_bytes() == made
    second.client_tls = ssl.create_default_context(cafile=folder / "cert.pem")
    assert (await second.generate("run-v1")).status == 200
    assert sorted(path.name for path in folder.iterdir()) == ["cert-and-key.pem", "cert.pem"]


async def test_a_replica_whose_certificate_is_not_trusted_stays_out(
    harness: Harness, server_tls: ssl.SSLContext
) -> None:
    replica = StandIn(tls=server_tls)
    await harness.replica(replica)
    trusted = await harness.replica()
    proxy = await harness.proxy(trusted, replica, expect_up=1)
    answer = await proxy.get("/health")
    assert "certificate" in answer.json()["unhealthy"][replica.url].lower()


async def test_only_a_known_token_gets_in_and_each_side_sees_its_own(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}, token=REPLICA_TOKEN))
    proxy = await harness.proxy(
        replica, tokens=(CLIENT_TOKEN, SECOND_TOKEN), replica_token=REPLICA_TOKEN
    )
    wrong = [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {CLIENT_TOKEN}"},
        {"authorization": basic("x", f"{CLIENT_TOKEN}x")},
        {"authorization": basic(CLIENT_TOKEN, "")},
        {"authorization": basic(CLIENT_TOKEN, REPLICA_TOKEN)},
        {"authorization": "Basic " + base64.b64encode(CLIENT_TOKEN.encode()).decode()},
        {"authorization": basic("x", CLIENT_TOKEN).replace("Basic", "Digest")},
        {"authorization": basic("x", CLIENT_TOKEN) + "!"},
        {"authorization": f"Bearer {CLIENT_TOKEN}x"},
        {"authorization": f"Bearer {CLIENT_TOKEN[:-1]}"},
        {"authorization": f"Bearer {REPLICA_TOKEN}"},
        {"x-api-key": CLIENT_TOKEN},
    ]
    for headers in wrong:
        for method, path in (("GET", "/health"), ("GET", "/metrics"), ("POST", "/pause")):
            answer = await proxy.request(method, path, headers=headers)
            assert (answer.status, answer.error_type) == (401, "unauthorized"), headers
            assert answer.header("www-authenticate") == "Bearer"
    for value in (
        f"Bearer {CLIENT_TOKEN}",
        f"bearer {SECOND_TOKEN}",
        basic("x", CLIENT_TOKEN),
        basic("", SECOND_TOKEN).replace("Basic", "basic"),
    ):
        answer = await proxy.request(
            "POST",
            "/v1/completions",
            headers={"authorization": value},
            body=b'{"model": "run-v1"}',
        )
        assert answer.status == 200
    assert len(replica.generations) == 4
    for seen in replica.generations:
        values = [value for name, value in seen.headers if name == "authorization"]
        assert values == [f"Bearer {REPLICA_TOKEN}"]
    assert replica.unauthorised == 0


async def test_clients_that_take_an_address_alone_can_carry_a_token_in_it(
    harness: Harness,
) -> None:
    """As stock TRL does: its trainer asks with requests, its rollout worker with aiohttp."""
    aiohttp = pytest.importorskip("aiohttp")
    requests = pytest.importorskip("requests")
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, tokens=(CLIENT_TOKEN,))
    for token, status in ((CLIENT_TOKEN, 200), (SECOND_TOKEN, 401)):
        address = f"http://x:{token}@127.0.0.1:{proxy.port}"
        answer = await asyncio.to_thread(requests.get, f"{address}/health", timeout=5)
        assert answer.status_code == status
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{address}/v1/completions", json={"model": "run-v1"}) as generated,
        ):
            assert generated.status == status


async def test_the_page_of_another_site_cannot_use_a_browsers_login(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, tokens=(CLIENT_TOKEN,))
    for origin in ("https://evil.example", "null", "http://proxy.evil.example", "http://proxy:1"):
        headers = {"authorization": basic("x", CLIENT_TOKEN), "origin": origin}
        for path in (f"/proxy/drain?replica={replica.url}", "/v1/completions"):
            answer = await proxy.request("POST", path, headers=headers, body=b"{}")
            assert (answer.status, answer.error_type) == (403, "route_forbidden"), origin
    assert not proxy.deps.fleet.replicas[0].draining
    headers = {"authorization": basic("x", CLIENT_TOKEN), "origin": "http://proxy"}
    path = f"/proxy/drain?replica={replica.url}"
    assert (await proxy.request("POST", path, headers=headers)).status == 200


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("evil.example:8000", False),  # its name server says 127.0.0.1 by now
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[evil", False),
        ("localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
    ],
)
async def test_a_site_that_names_its_own_host_like_the_proxys_address_gets_nothing(
    harness: Harness, host: str, served: bool
) -> None:
    proxy = await harness.proxy(await harness.replica(StandIn(ready={"run-v1"})))
    ask = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 19\r\n"
    for origin, status in ((f"origin: http://{host}\r\n", 200 if served else 403), ("", 200)):
        async with proxy.client() as client:
            client.writer.write(f'{ask}{origin}\r\n{{"model": "run-v1"}}'.encode())
            assert (await client.answer()).status == status


async def test_a_replica_that_refuses_the_proxys_token_says_so_in_the_health(
    harness: Harness,
) -> None:
    replica = await harness.replica(StandIn(token=REPLICA_TOKEN))
    proxy = await harness.proxy(replica, replica_token="another-wrong-token", expect_up=0)
    answer = await proxy.get("/health")
    assert answer.status == 503
    assert "401" in answer.json()["unhealthy"][replica.url]


async def test_no_token_stands_in_logs_errors_or_metrics(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replica = await harness.replica(StandIn(ready={"run-v1"}, token=REPLICA_TOKEN))
    proxy = await harness.proxy(replica, tokens=(CLIENT_TOKEN,), replica_token=REPLICA_TOKEN)
    login = {"authorization": f"Bearer {CLIENT_TOKEN}"}
    bodies = [
        (await proxy.request("POST", "/v1/completions", headers=login, body=body)).body
        for body in (b'{"model": "run-v1"}', b'{"model": "none"}', b"{")
    ]
    bodies.append((await proxy.request("GET", "/collective_rpc", headers=login)).body)
    bodies.append((await proxy.request("GET", "/health", headers=login)).body)
    await replica.stop()
    await proxy.until_up(0)
    bodies.append((await proxy.request("POST", "/v1/completions", headers=login, body=b"{}")).body)
    bodies.append((await proxy.request("GET", "/bucket_lora/status", headers=login)).body)
    bodies.append((await proxy.request("GET", "/metrics", headers=login)).body)
    async with proxy.client() as client:
        client.writer.write(b"GET /\x00 HTTP/1.1\r\nauthorization: Bearer " + CLIENT_TOKEN.encode())
        client.writer.write(b"\r\n\r\n")
        bodies.append(await client.reader.read(1000))
    everything = caplog.text + repr(proxy.config) + b"".join(bodies).decode()
    for token in (CLIENT_TOKEN, REPLICA_TOKEN):
        assert token not in everything
    assert "left the rotation" in caplog.text

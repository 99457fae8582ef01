"""The page for people: over HTTP, and in a real browser where one is installed."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from pathlib import Path

import pytest

from adapter_bucket.status import ReplicaStatus, RunStatus
from tests.proxy.proxy_harness import Harness, Proxy, until
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio

TOKEN = "client-token-0123456789"

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs a browser: install Debian's chromium, or set CHROMIUM"
)


def login(token: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{token}".encode()).decode()}


async def test_it_shows_replicas_runs_load_and_errors(harness: Harness) -> None:
    first = await harness.replica(StandIn(ready={"run-v3", "run-v4"}))
    second = await harness.replica(StandIn(ready={"run-v3"}))
    proxy = await harness.proxy(first, second)
    for number in range(4):
        assert (await proxy.generate("run-v3", prompt=[number] * 32)).status == 200
    answer = await proxy.get("/")
    html = answer.body.decode()
    assert answer.status == 200
    assert answer.header("content-type") == "text/html; charset=utf-8"
    assert "default-src 'none'" in str(answer.header("content-security-policy"))
    assert "2 of 2 replicas up" in html
    assert "run v3–v4" in html
    assert "v4 on 1 of 2" in html
    assert "200: 4" in html
    await second.stop()
    await proxy.until_up(1)
    await first.stop()
    await proxy.until_up(0)
    assert (await proxy.generate("run-v3")).status == 503
    html = (await proxy.get("/")).body.decode()
    assert "0 of 2 replicas up" in html
    assert "503 no_replica" in html
    assert f"{second.url} left the rotation" in html


async def test_a_replica_says_why_it_is_not_simply_up(harness: Harness) -> None:
    replicas = await harness.replicas(3, "run-v1")
    proxy = await harness.proxy(*replicas)
    drained, failing, starting = proxy.deps.fleet.replicas
    drained.draining = True
    for _ in range(5):
        failing.breaker.fail(0.0)
    starting.slow_start_s, starting.warm_at = 1e6, asyncio.get_running_loop().time() + 1e6
    html = (await proxy.get("/")).body.decode()
    for word in ("draining", "failing", "starting"):
        assert f'class="state {word}">{word}<' in html


async def test_the_trouble_of_a_run_is_shown(harness: Harness) -> None:
    replica = await harness.replica(StandIn(ready={"run-v2"}))
    proxy = await harness.proxy(replica)
    status = proxy.deps.fleet.replicas[0].status
    assert isinstance(status, ReplicaStatus)
    proxy.deps.fleet.replicas[0].status = status.model_copy(
        update={
            "runs": {
                "run": RunStatus(
                    state="running", latest=5, window=4, ready=[2], refused={5: "rank 64 above 8"}
                )
            }
        }
    )
    html = (await proxy.get("/")).body.decode()
    assert "rank 64 above 8" in html
    assert '<td class="n">v5</td><td class="n">v2 on 1 of 1</td><td class="n">3</td>' in html


async def test_it_asks_for_the_token_like_every_route(harness: Harness) -> None:
    proxy = await harness.proxy(tokens=(TOKEN,))
    answer = await proxy.get("/")
    assert answer.status == 401
    challenges = [value for name, value in answer.headers if name == "www-authenticate"]
    assert challenges == ["Bearer", 'Basic realm="bucket-lora-proxy"']
    assert (await proxy.request("GET", "/", headers=login(TOKEN))).status == 200
    assert (await proxy.request("GET", "/", headers=login(TOKEN[:-1]))).status == 401
    assert (await proxy.request("POST", "/", headers=login(TOKEN))).status == 405


@in_a_browser
async def test_a_browser_shows_it_and_keeps_it_up_to_date(harness: Harness, tmp_path: Path) -> None:
    """With the token in the browser's login, hostile texts, and a change after the page came."""
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    proxy.deps.errors.add("<img id=hostile src=x onerror=alert(1)>", "<script>alert(2)</script>")
    browsing = asyncio.create_task(browse(proxy, tmp_path, "--virtual-time-budget=9000"))
    await until(lambda: shown(proxy) >= 1, 30)
    replica.make_ready("run-v2")
    html, log = await browsing
    assert shown(proxy) >= 2  # the script asked again
    assert "run v1–v2" in html
    assert "hostile" in html
    assert "<img" not in html
    assert "<script>alert" not in html
    assert "Content Security Policy" not in log
    assert "Uncaught" not in log
    assert 'class="stale"' not in html


@in_a_browser
async def test_it_is_drawn(harness: Harness, tmp_path: Path) -> None:
    replica = await harness.replica(StandIn(ready={"run-v1"}))
    proxy = await harness.proxy(replica, tokens=(TOKEN,))
    picture = tmp_path / "page.png"
    await browse(proxy, tmp_path, f"--screenshot={picture}", "--window-size=1000,600")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 10_000  # an empty page takes 3 KB


def shown(proxy: Proxy) -> int:
    return proxy.deps.status_page.shown


async def browse(proxy: Proxy, profile: Path, *options: str) -> tuple[str, str]:
    """Open the page; returns the document as it stands at the end, and the browser's log."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}/browser",
        *(options if any("screenshot" in one for one in options) else ("--dump-dom", *options)),
        f"http://me:{TOKEN}@127.0.0.1:{proxy.port}/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        async with asyncio.timeout(60):
            out, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(), log.decode(errors="replace")

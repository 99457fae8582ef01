"""The installed command as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

import pytest

from tests.proxy.proxy_harness import Client, Harness
from tests.proxy.stand_in import StandIn

pytestmark = pytest.mark.anyio

COMMAND = [sys.executable, "-m", "bucket_lora_proxy"]


async def test_the_command_serves_until_sigterm_and_finishes_what_is_running(
    harness: Harness,
) -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(received: object, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    replica = await harness.replica(StandIn(behaviour=slow))
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--replica", replica.url, "--port", "0", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        log = ""
        while not ("ready on" in log and "joined the rotation" in log):
            log += (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        match = re.search(r"ready on http://127\.0\.0\.1:(\d+), 1 replicas, no token", log)
        assert match, log
        client = Client(*await asyncio.open_connection("127.0.0.1", int(match[1])))
        await client.send("POST", "/v1/completions", body=b'{"model": "base"}')
        await asyncio.wait_for(asked.wait(), 20)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        release.set()
        assert (await client.answer()).status == 200
        client.close()
        assert await asyncio.wait_for(process.wait(), 10) in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_wrong_setting_ends_with_status_2_and_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "--replica",
        "nonsense",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "BUCKET_LORA_PROXY_TOKEN": ""},
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().startswith("bucket-lora-proxy: replica URL 'nonsense' is not http")
    assert stderr.count(b"\n") == 1


async def test_a_port_in_use_ends_with_an_error(harness: Harness) -> None:
    replica = await harness.replica()
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "--replica",
        replica.url,
        "--port",
        str(replica.port),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"Address already in use" in stderr

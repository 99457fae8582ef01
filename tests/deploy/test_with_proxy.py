"""A command with a real proxy beside it, over real sockets."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from demo.processes import free_port
from tests.proxy.stand_in import StandIn
from trl_async_bucket.launch.with_proxy import PROXY_LOST, ProxiedCommand

pytestmark = pytest.mark.anyio

ASKS = (
    "import sys, urllib.request; "
    "print(urllib.request.urlopen('http://127.0.0.1:{port}/health').status, flush=True); "
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def start(
    port: int, replica: str, program: str, *flags: str, wait_s: str = "30"
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trl_async_bucket.launch", "with-proxy", "--port", str(port),
        "--wait-s", wait_s, "--replica", replica, *flags, "--", sys.executable, "-c", program,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode(), errors.decode()


async def test_the_command_finds_the_proxy_and_gives_its_exit_code() -> None:
    replica, port = StandIn(), free_port()
    await replica.start()
    process = await start(port, replica.url, ASKS.format(port=port) + "sys.exit(3)")
    code, output, errors = await ended(process)
    await replica.stop()
    assert (code, output.strip()) == (3, "200"), errors
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_sigterm_reaches_the_command_while_the_proxy_still_serves() -> None:
    replica, port = StandIn(), free_port()
    await replica.start()
    program = (
        "import signal, sys, time, urllib.request\n"
        "def last(*_):\n"
        f"    answer = urllib.request.urlopen('http://127.0.0.1:{port}/health')\n"
        "    sys.exit(40 if answer.status == 200 else 1)\n"
        "signal.signal(signal.SIGTERM, last)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    process = await start(port, replica.url, program)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 40)
    process.send_signal(signal.SIGTERM)
    code, _, errors = await ended(process)
    await replica.stop()
    assert code == 40, errors


async def test_no_healthy_replica_is_an_error_and_the_command_is_not_started() -> None:
    port = free_port()
    nobody = f"http://127.0.0.1:{free_port()}"
    process = await start(port, nobody, "print('started')", wait_s="2")
    code, output, errors = await ended(process)
    assert code == PROXY_LOST
    assert "started" not in output
    assert "no replica was healthy within 2 s (--wait-s)" in errors


async def test_a_token_that_only_the_proxy_knows_is_an_error_at_once(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-proxy")
    nobody = f"http://127.0.0.1:{free_port()}"
    process = await start(free_port(), nobody, "print('started')", "--token-file", str(tokens))
    code, output, errors = await ended(process)
    assert code == PROXY_LOST
    assert "started" not in output
    assert "leave out --token-file" in errors
    assert "no replica was healthy" not in errors


async def test_a_proxy_that_cannot_start_is_an_error() -> None:
    process = await start(free_port(), "nonsense", "print('started')")
    code, output, errors = await ended(process)
    assert code == PROXY_LOST
    assert "started" not in output
    assert "bucket-lora-proxy ended with code 2" in errors


@pytest.mark.parametrize(("replica", "code"), [("http://127.0.0.1:9", 0), ("nonsense", 2)])
def test_a_dry_run_checks_the_settings_and_starts_nothing(replica: str, code: int) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "trl_async_bucket.launch", "with-proxy", "--dry-run",
            "--replica", replica, "--", sys.executable, "-c", "print('started')", "a b",
        ],
        capture_output=True, text=True, check=False,
        env={**os.environ, "BUCKET_LORA_PROXY_TOKEN": "a-secret-of-a-run"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    printed = done.stdout.splitlines()
    assert shlex.split(printed[-1])[2:] == [
        sys.executable, "-c", "print('started')", "a b"
    ]  # fmt: skip
    assert "started" not in printed
    assert "a-secret-of-a-run" not in done.stdout + done.stderr
    assert ("replicas = http://127.0.0.1:9" in printed) == (code == 0)


@pytest.mark.parametrize(
    ("command", "flags", "word"),
    [
        ([], [], "needs a command"),
        (["true"], ["--host", "0.0.0.0"], "leave out --host"),
        (["true"], ["--tls-cert=a.pem"], "leave out --tls-cert"),
    ],
)
def test_what_would_not_work_is_refused(command: list[str], flags: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ProxiedCommand(command, proxy_flags=flags, port=8000, wait_s=1)

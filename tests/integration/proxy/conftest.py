"""A stock vLLM with every dangerous route open, and the proxy before it, as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from demo.processes import free_port
from tests.integration.plugin.server import LORA_FLAGS, command, environment
from tests.integration.plugin.tiny_model import build_base
from tests.integration.proxy.raw_client import Raw

CLIENT_TOKEN = "client-token-4f1b8d2c"
REPLICA_TOKEN = "replica-token-9a7e3c5d"
START_S = 240.0
BODY_TIMEOUT_S = 3


@dataclass
class Gateway:
    """What the tests talk to."""

    port: int
    """Of the proxy."""
    log: Path
    server_port: int
    server_log: Path
    model: str
    drips: list[Raw]
    """Connections that have been sending a head very slowly since the proxy started."""

    def raw(self) -> Raw:
        return Raw(self.port)

    def ask(self, method: str, path: str, *fields: str, body: bytes = b"") -> tuple[int, bytes]:
        """One exchange with the client's token."""
        return self.raw().exchange(
            method, path, f"authorization: Bearer {CLIENT_TOKEN}", *fields, body=body
        )

    def direct(self, path: str) -> bytes:
        """Ask vLLM itself, as an operator would; marked, so that ``reached`` leaves it out."""
        status, body = Raw(self.server_port).exchange(
            "GET", f"{path}?direct", f"authorization: Bearer {REPLICA_TOKEN}"
        )
        assert status == 200, body
        return body

    def reached(self) -> list[str]:
        """Every request that the proxy sent to vLLM so far, as ``POST /path``, from vLLM's log."""
        text = self.server_log.read_text(errors="replace")
        lines = re.findall(r'- "(\w+) ([^ ?"]*)([^"]*) HTTP', text)
        return [f"{method} {path}" for method, path, query in lines if query != "?direct"]


@contextmanager
def process(arguments: list[str], output: IO[bytes], env: dict[str, str]) -> Iterator[None]:
    started = subprocess.Popen(
        arguments, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield
        assert started.poll() is None, "it did not survive the tests"
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Both, once the proxy has the server in rotation.

    The proxy starts first, so that slow clients have been at it for a while when the tests begin.
    """
    folder = tmp_path_factory.mktemp("security")
    model = str(build_base(folder / "tiny-base"))
    for name, token in (("client", CLIENT_TOKEN), ("replica", REPLICA_TOKEN)):
        (folder / name).write_text(token + "\n")
    port, server_port = free_port(), free_port()
    proxy = [
        sys.executable, "-m", "bucket_lora_proxy", f"--port={port}",
        f"--replica=http://127.0.0.1:{server_port}", f"--token-file={folder / 'client'}",
        f"--replica-token-file={folder / 'replica'}", f"--body-timeout-s={BODY_TIMEOUT_S}",
    ]  # fmt: skip
    server = command(
        model, server_port, (*LORA_FLAGS, f"--api-key={REPLICA_TOKEN}", "--enable-log-requests")
    )
    wide_open = environment(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    logs = folder / "proxy.log", folder / "server.log"
    with (
        logs[0].open("wb") as proxy_output,
        logs[1].open("wb") as server_output,
        process(server, server_output, wide_open),
        process(proxy, proxy_output, dict(os.environ)),
    ):
        made = Gateway(port, logs[0], server_port, logs[1], model, [])
        try:
            _until_healthy(made)
            yield made
        finally:
            for drip in made.drips:
                drip.close()


def _until_healthy(gateway: Gateway) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if not gateway.drips:
                gateway.drips = [gateway.raw() for _ in range(100)]
            for drip in gateway.drips:
                drip.write(b"GET /health HTTP/1.1\r\n" if not drip.sent else b"x")
            if gateway.ask("GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"no replica:\n{gateway.log.read_text()[-2000:]}")

"""Runs a command with ``bucket-lora-proxy`` beside it on the same machine, loopback only.

For places that start one process: a job, a batch script, a container. A signal reaches the command
and not the proxy, so that a trainer that got a spot notice can still publish and finish; the proxy
ends last. The command's exit code is the exit code.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from adapter_bucket.errors import ConfigError

START_WAIT_S = 1800.0
"""A replica downloads its model first."""

POLL_S = 0.5
PROXY_STOP_S = 40.0
"""The proxy's own ``--shutdown-s`` is 30."""

PROXY_LOST = 70
"""Exit code where the proxy ended first (``EX_SOFTWARE``)."""


class ProxiedCommand:
    """One command and its proxy."""

    def __init__(
        self, command: Sequence[str], *, proxy_flags: Sequence[str], port: int, wait_s: float
    ) -> None:
        """Check the command.

        Raises:
            ConfigError: there is no command, the proxy is not installed, or the flags would make
                it listen elsewhere than the command expects.
        """
        if not command:
            raise ConfigError("with-proxy needs a command: add -- and the command at the end")
        for flag in proxy_flags:
            if flag.partition("=")[0] in ("--host", "--tls-cert", "--dev-cert"):
                raise ConfigError(
                    f"with-proxy serves the command on 127.0.0.1 without TLS: leave out {flag}. "
                    "For other machines start bucket-lora-proxy by itself"
                )
        self._command = list(command)
        self._proxy = [
            *_proxy_program(), "--host", "127.0.0.1", "--port", str(port), *proxy_flags
        ]  # fmt: skip
        self._port = port
        self._wait_s = wait_s
        self._signal = 0
        self._child: subprocess.Popen[bytes] | None = None

    def dry_run(self) -> int:
        """Start nothing: print the proxy's settings, secrets masked, and the command.

        Returns:
            0, or the code with which the proxy refuses its settings.
        """
        code = subprocess.run([*self._proxy, "--check"], check=False).returncode
        print(f"command = {shlex.join(self._command)}")
        return code

    def run(self) -> int:
        """Start both, wait for the command, end the proxy. Main thread only.

        Returns:
            The command's exit code (128 + N where signal N ended it); ``PROXY_LOST`` where the
            proxy ended, or no replica was healthy in time.
        """
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        # A process group of its own: a terminal's Ctrl-C must not end the proxy before the command.
        proxy = subprocess.Popen(self._proxy, start_new_session=True)
        try:
            if fault := self._wait_healthy(proxy):
                print(f"with-proxy: {fault}", file=sys.stderr)
                return 128 + self._signal if self._signal else PROXY_LOST
            return self._run_command(proxy)
        finally:
            _stop(proxy)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_command(self, proxy: subprocess.Popen[bytes]) -> int:
        self._child = subprocess.Popen(self._command, start_new_session=True)
        if self._signal:  # it came while the process was being made
            self._child.send_signal(self._signal)
        proxy_lost = False
        while True:
            try:
                code = self._child.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if proxy.poll() is not None and not proxy_lost and not self._signal:
                    proxy_lost = True
                    print(
                        f"with-proxy: bucket-lora-proxy ended with code {proxy.returncode}; "
                        "stopping the command, which has no replicas without it",
                        file=sys.stderr,
                    )
                    self._child.terminate()
        if proxy_lost:
            return PROXY_LOST
        return code if code >= 0 else 128 - code

    def _wait_healthy(self, proxy: subprocess.Popen[bytes]) -> str | None:
        """Wait for the proxy and one replica; returns what went wrong."""
        deadline = time.monotonic() + self._wait_s
        answer = "no answer yet"
        while time.monotonic() < deadline:
            if self._signal:
                return "stopped by a signal before the command was started"
            if proxy.poll() is not None:
                return f"bucket-lora-proxy ended with code {proxy.returncode}; its words are above"
            status, answer = self._ask()
            if status == 200:
                return None
            if status == 401:  # it will not be another one later
                return (
                    "the proxy asks for a token that this command does not know: on 127.0.0.1 it "
                    "needs none, so leave out --token-file, or set BUCKET_LORA_PROXY_TOKEN instead"
                )
            time.sleep(POLL_S)
        return f"no replica was healthy within {self._wait_s:g} s (--wait-s): {answer}"

    def _ask(self) -> tuple[int, str]:
        """Status and text of the proxy's ``/health``; status 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        token = os.environ.get("BUCKET_LORA_PROXY_TOKEN", "").split()
        headers = {"Authorization": f"Bearer {token[0]}"} if token else {}
        try:
            connection.request("GET", "/health", headers=headers)
            answer = connection.getresponse()
            text = answer.read(2000).decode(errors="replace").strip()
            return answer.status, text
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(number)


def _proxy_program() -> list[str]:
    if importlib.util.find_spec("bucket_lora_proxy") is None or (
        importlib.util.find_spec("starlette") is None
    ):
        raise ConfigError(
            "bucket-lora-proxy is not installed here: pip install 'trl-async-bucket[proxy]'"
        )
    return [sys.executable, "-m", "bucket_lora_proxy"]


def _stop(proxy: subprocess.Popen[bytes]) -> None:
    if proxy.poll() is None:
        proxy.terminate()
        try:
            proxy.wait(PROXY_STOP_S)
        except subprocess.TimeoutExpired:
            proxy.kill()
            proxy.wait()

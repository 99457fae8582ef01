"""A real ``vllm serve`` with the plugin, as a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_bucket.status import ReplicaStatus
from demo.processes import free_port

START_S = 240.0
"""Longest start: two engines on a busy machine with two cores."""

CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # see demo.fleet
}
BASE_FLAGS = (
    "--host=127.0.0.1",
    "--max-model-len=256",
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-batched-tokens=16384",  # a prompt split in two kills a CPU engine, if seeded
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
)
LORA_FLAGS = ("--enable-lora", "--max-lora-rank=64", "--max-loras=8")
API_KEY = "let-me-in"


@dataclass
class Server:
    """A running server. Requests are sent with its key unless another one is given."""

    port: int
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str, *, key: str = API_KEY) -> Any:
        return json.loads(self.text(path, key=key))

    def text(self, path: str, body: dict[str, Any] | None = None, *, key: str = API_KEY) -> str:
        """The answer's text; with a body, that of a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data)
        request.add_header("Content-Type", "application/json")
        return _send(request, key)

    def post(self, path: str, body: dict[str, Any], *, key: str = API_KEY) -> Any:
        answer = self.text(path, body, key=key)
        return json.loads(answer) if answer else None  # /sleep and /wake_up answer nothing

    def kill(self) -> None:
        """Kill every process of the server, as a machine that is taken away does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def status(self, adapter: str | None = None, wait_s: float = 0.0) -> ReplicaStatus:
        query = f"?adapter={adapter}&wait={wait_s}" if adapter else ""
        return ReplicaStatus.model_validate(self.get(f"/bucket_lora/status{query}"))

    def generate(self, model: str, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """Greedy completion with the log-probability of every token."""
        answer = self.post(
            "/v1/completions",
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        choice: dict[str, Any] = answer["choices"][0]
        return choice


def wait_until(condition: Callable[..., bool], limit_s: float = 30.0) -> None:
    """Wait for something that the server does by itself."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command(model: str, port: int, flags: Sequence[str]) -> list[str]:
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, "serve", model, f"--port={port}", *BASE_FLAGS, *flags]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BUCKET_LORA_", "VLLM_"))}
    return {**kept, **CPU_ENV, **extra}


@contextmanager
def running_server(model: str, log: Path, flags: Sequence[str], **env: str) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and stop it, with all its children, afterwards."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(model, port, (*LORA_FLAGS, f"--api-key={API_KEY}", *flags)),
            env=environment(**env),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(port, model, log, process)
    try:
        _wait_healthy(server)
        yield server
    finally:
        _stop(process)


@contextmanager
def engine_elsewhere(model: str, log: Path, flags: Sequence[str]) -> Iterator[None]:
    """Run an engine without API server, as on another machine of a data-parallel server."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(model, free_port(), (*LORA_FLAGS, "--headless", *flags)),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        _stop(process)


def _wait_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{server.log.read_text()[-6000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text()[-6000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _send(request: urllib.request.Request, key: str) -> str:
    request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=60) as response:
        body: bytes = response.read()
        return body.decode()

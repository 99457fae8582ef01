"""The parts of a run as command lines: replicas, proxy, trainer. Loopback only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from adapter_bucket.status import STATUS_PATH, ReplicaStatus
from demo.processes import Child, Processes, free_port
from demo.train import LORA_RANK, MAX_STALENESS

REPLICA_START_S = 400.0
"""vLLM takes 30 to 75 s to be healthy on two free cores, and minutes on busy ones."""

WINDOW = MAX_STALENESS + 2
MAX_LORAS = 2 * WINDOW
"""Twice a run's window: a second run finds room while the first one's last version stays."""

_BIN = Path(sys.executable).parent

# Neither of the two switches that open vLLM's control routes is set: the plugin needs none.
_CPU_VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Even with --enforce-eager the first request has Inductor compile how log-probabilities are
    # ranked: seconds of a C++ compiler, more than half a minute the first time on a machine.
    "TORCH_COMPILE_DISABLE": "1",
}
_OFFLINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Server:
    """A started replica or proxy."""

    child: Child
    url: str

    def healthy(self) -> bool:
        """Whether it answers ``/health`` with 200."""
        try:
            return requests.get(f"{self.url}/health", timeout=2).status_code == 200
        except requests.RequestException:
            return False

    def status(self) -> ReplicaStatus | None:
        """A replica's ``/bucket_lora/status``, or ``None`` while it does not answer."""
        try:
            answer = requests.get(f"{self.url}{STATUS_PATH}", timeout=2)
            return ReplicaStatus.model_validate_json(answer.content) if answer.ok else None
        except requests.RequestException:
            return None


def serve_command(model: Path, port: int, *extra: str) -> list[str]:
    """``vllm serve`` for the demo's model on a CPU."""
    return [
        str(_BIN / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "256", "--dtype", "float32", "--enforce-eager",
        # CPU build: a seeded request whose prompt is split kills the engine; so never split.
        "--max-num-batched-tokens", "16384",
        # The trainer compares its own logprobs with these: they must be those of the sampler.
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", str(MAX_LORAS),
        *extra,
    ]  # fmt: skip


def start_replica(
    processes: Processes,
    name: str,
    model: Path,
    bucket: str,
    *extra: str,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Start one replica; it is healthy later."""
    port = port or free_port()
    plugin = ("--plugin", "bucket-lora", "--bucket-lora-url", bucket)
    command = serve_command(model, port, *plugin, *extra)
    environment = {**_CPU_VLLM_ENV, **_OFFLINE_ENV, **(env or {})}
    return Server(processes.start(name, command, env=environment), f"http://127.0.0.1:{port}")


def start_stock_server(processes: Processes, model: Path, *, name: str = "stock") -> Server:
    """Start vLLM as TRL's own adapter sync wants it: no plugin, both control switches on."""
    port = free_port()
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    environment = {**_CPU_VLLM_ENV, **_OFFLINE_ENV, **switches}
    child = processes.start(name, serve_command(model, port), env=environment)
    return Server(child, f"http://127.0.0.1:{port}")


def start_proxy(processes: Processes, replicas: Sequence[Server]) -> Server:
    """Start the proxy in front of the replicas."""
    port = free_port()
    command = [str(_BIN / "bucket-lora-proxy"), "--host", "127.0.0.1", "--port", str(port)]
    for replica in replicas:
        command += ["--replica", replica.url]
    return Server(processes.start("proxy", command), f"http://127.0.0.1:{port}")


def start_trainer(
    processes: Processes,
    model: Path,
    server_url: str,
    out: Path,
    *extra: str,
    name: str = "trainer",
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start the trainer; it ends by itself."""
    command = [
        sys.executable, "-m", "demo.train", "--model", str(model), "--server", server_url,
        "--out", str(out), *extra,
    ]  # fmt: skip
    threads = str(max((os.cpu_count() or 2) // 2, 1))
    return processes.start(
        name, command, env={"OMP_NUM_THREADS": threads, **_OFFLINE_ENV, **(env or {})}
    )


def wait_healthy(processes: Processes, servers: Sequence[Server]) -> None:
    """Wait until all servers answer ``/health``.

    Raises:
        RuntimeError: one ended, or was not healthy in time.
    """
    processes.wait_until(
        f"{', '.join(server.child.name for server in servers)} to be healthy",
        lambda: all(server.healthy() for server in servers),
        timeout_s=REPLICA_START_S,
        watch=[server.child for server in servers],
    )

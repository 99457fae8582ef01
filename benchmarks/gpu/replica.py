"""Starts vLLM for the benchmarks: one server that takes versions from a bucket and by push.

Both doors are open so that all contenders meet the same server: the plugin, and the two switches
that stock pushes need.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import requests

from benchmarks.gpu import metadata, probe
from demo.processes import Child, Processes, free_port

START_S = 420.0

_SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# FlashInfer's sampler and DeepGEMM need a compiler at run time; a machine may have none.
_GPU_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}

CPU_FLAGS = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=512",
    "--max-num-batched-tokens=16384",  # a prompt split in two kills a CPU engine, if seeded
)  # fmt: skip


class Replica:
    """A started server."""

    def __init__(self, child: Child, url: str, probe_dir: Path) -> None:
        self.child = child
        self.url = url
        self.probe_dir = probe_dir

    def healthy(self) -> bool:
        """Whether it answers ``/health`` with 200."""
        try:
            return requests.get(f"{self.url}/health", timeout=2).status_code == 200
        except requests.RequestException:
            return False

    def generated_tokens(self) -> float:
        """Tokens generated since the start, from vLLM's own counter."""
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith("vllm:generation_tokens_total"):
                return float(line.rpartition(" ")[2])
        raise RuntimeError(f"{self.url}/metrics has no vllm:generation_tokens_total")


def start(
    processes: Processes,
    name: str,
    model: Path,
    *,
    bucket: Path | None,
    max_lora_rank: int | None,
    flags: Sequence[str],
    work: Path,
    cpu: bool,
    env: Mapping[str, str] | None = None,
) -> Replica:
    """Start one server; it is healthy later.

    Args:
        processes: Who ends it.
        name: Of its log file.
        model: Directory of the base model.
        bucket: Folder to follow; ``None``: without the plugin.
        max_lora_rank: ``None``: without LoRA.
        flags: More flags of ``vllm serve``.
        work: Where the probe's folder goes.
        cpu: Whether this is the CPU build.
        env: More environment.
    """
    port = free_port()
    probe_dir = work / f"probe-{name}"
    probe_dir.mkdir(parents=True, exist_ok=True)
    metadata.write_probe(probe_dir)
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--host=127.0.0.1", f"--port={port}", "--generation-config=vllm",
        "--logprobs-mode=processed_logprobs", "--disable-uvicorn-access-log", *flags,
    ]  # fmt: skip
    if max_lora_rank is not None:
        command += ["--enable-lora", f"--max-lora-rank={max_lora_rank}"]
    if bucket is not None:
        command += ["--plugin=bucket-lora", f"--bucket-lora-url=file://{bucket}"]
    environment = {
        **_OFFLINE,
        **_SWITCHES,
        **(_CPU_ENV if cpu else _GPU_ENV),
        "PYTHONPATH": ":".join([str(probe_dir), *sys.path[1:]]),
        probe.VARIABLE: str(probe_dir),
        **(env or {}),
    }
    child = processes.start(name, command, env=environment)
    return Replica(child, f"http://127.0.0.1:{port}", probe_dir)


def wait_healthy(processes: Processes, replicas: Sequence[Replica]) -> None:
    """Wait until all answer ``/health``.

    Raises:
        RuntimeError: one ended, or was not healthy in time.
    """
    processes.wait_until(
        f"{len(replicas)} replicas to be healthy",
        lambda: all(replica.healthy() for replica in replicas),
        timeout_s=START_S,
        watch=[replica.child for replica in replicas],
    )

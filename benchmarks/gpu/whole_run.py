"""A whole GRPO run: how long does each weight sync keep the optimizer, and what comes out?

    python -m benchmarks.gpu.whole_run [--tiny] [--ranks 16,64] [--ways bucket,trl,nccl]
                                       [--gpus 1,2] [--steps 40]

Trainer and one replica, on one GPU or on one each. The base model has the layers of Qwen2.5-0.5B
and is warmed up here. Ways: ``bucket`` is this package; ``trl`` is TRL's adapter sync (pause, save,
load, resume); ``nccl`` is TRL's merged sync, for which NCCL needs two GPUs. Everything else is the
same for all. Servers that wait for their turn are idle. Rows are written as runs end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import replica, report, task
from benchmarks.gpu.trainer import MAX_STALENESS
from demo.processes import Processes

COLUMNS = (
    "way", "rank", "GPUs", "steps", "optimizer blocked a sync, ms", "blocked worst, ms",
    "step, s", "rollout wait, s", "generated tokens/s", "reward first 5", "reward last 5",
    "ratio min", "ratio max", "ready after, ms", "why not",
)  # fmt: skip
SKIP = 5
"""First steps left out of the medians: queues fill, kernels compile."""

GPU_FLAGS = (
    "--dtype=bfloat16", "--max-model-len=512", "--gpu-memory-utilization=0.2",
    "--kv-cache-memory-bytes=8G",
)  # fmt: skip


class TokenRate(threading.Thread):
    """Reads the server's token counter twice a second."""

    def __init__(self, server: Any) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._stopped = threading.Event()
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._stopped.wait(0.5):
            self.samples.append((time.time(), self._server.generated_tokens()))

    def stop(self) -> None:
        """End reading."""
        self._stopped.set()
        self.join()

    def between(self, started: float, ended: float) -> float | None:
        """Tokens a second in that time."""
        inside = [sample for sample in self.samples if started <= sample[0] <= ended]
        if len(inside) < 2:
            return None
        (t0, n0), (t1, n1) = inside[0], inside[-1]
        return (n1 - n0) / (t1 - t0)


def main() -> None:
    """Run every way on every rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--ranks", help="default 16,64; --tiny: 8")
    parser.add_argument("--ways", default="bucket,trl,nccl")
    parser.add_argument("--gpus", default="1", help="for trainer and replica: 1, 2, or 1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this")
    parser.add_argument("--run-seconds", type=float, default=1e9, help="end a run after this")
    parser.add_argument("--name", default="whole_run", help="of the JSON file")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--vllm-flag", action="append", default=[], help="more of them")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/benchmark-logs"))
    options = parser.parse_args()
    options.ranks = [
        int(r) for r in (options.ranks or ("8" if options.tiny else "16,64")).split(",")
    ]
    options.gpus = [int(gpus) for gpus in options.gpus.split(",")]
    options.steps = options.steps or (6 if options.tiny else 40)
    options.answer_chars = 12 if options.tiny else 96
    rows = run_all(options)
    report.finish(options.name, COLUMNS, rows, options.out)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per rank, number of GPUs and way."""
    deadline = time.monotonic() + options.seconds
    rows = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Processes(options.logs, lambda _name, _line: None) as processes,
    ):
        work = Path(folder)
        task.build(
            work / "model",
            "tiny" if options.tiny else "0.5B",
            answer_chars=options.answer_chars,
            steps=120 if options.tiny else 150,
            device="cpu" if options.tiny else "cuda",
        )
        servers = {
            (gpus, way): _serve(processes, way, gpus, work, options)
            for gpus in options.gpus
            for way in options.ways.split(",")
            if way != "nccl" or gpus > 1
        }
        replica.wait_healthy(processes, list(servers.values()))
        print("servers are healthy", flush=True)
        for rank in options.ranks:
            for (gpus, way), server in servers.items():
                if time.monotonic() > deadline or (way == "nccl" and rank != options.ranks[0]):
                    continue
                row = _train(processes, way, rank, gpus, server, work, options)
                print(json.dumps({**row, "per step": None}), flush=True)
                rows.append(row)
                report.write(options.name, rows, options.out)
    return rows


def _serve(
    processes: Processes, way: str, gpus: int, work: Path, options: argparse.Namespace
) -> Any:
    lora = () if way == "nccl" else (f"--max-loras={2 * (MAX_STALENESS + 2)}",)
    nccl = ("--weight-transfer-config", '{"backend":"nccl"}') if way == "nccl" else ()
    env = {"VLLM_HOST_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": str(gpus - 1)}
    if way == "bucket":  # it needs neither switch
        env |= {"VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    bucket = work / f"bucket-{gpus}"
    bucket.mkdir(exist_ok=True)
    return replica.start(
        processes, f"server-{way}-{gpus}", work / "model",
        bucket=bucket if way == "bucket" else None,
        max_lora_rank=None if way == "nccl" else max(options.ranks),
        flags=(
            *(replica.CPU_FLAGS if options.tiny else GPU_FLAGS), *lora, *nccl, *options.vllm_flag,
        ),
        work=work, cpu=options.tiny, env=env,
    )  # fmt: skip


def _train(
    processes: Processes, way: str, rank: int, gpus: int, server: Any, work: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    name = f"{way}-rank{rank}-{gpus}"
    out = work / name
    command = [
        sys.executable, "-m", "benchmarks.gpu.trainer", f"--way={way}",
        f"--model={work / 'model'}", f"--server={server.url}",
        f"--bucket=file://{work / f'bucket-{gpus}'}",
        f"--run-id={name}", f"--rank={rank}", f"--steps={options.steps}",
        f"--answer-chars={options.answer_chars}", f"--out={out}",
    ]  # fmt: skip
    env = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "0"}
    if options.tiny:
        env["OMP_NUM_THREADS"] = "1"
    rate = TokenRate(server)
    rate.start()
    child = processes.start(f"trainer-{name}", command, env=env)
    path = out / "metrics.jsonl"
    until = time.monotonic() + options.run_seconds
    while child.process.poll() is None and len(_steps(path)) < options.steps:
        time.sleep(0.2)
        if time.monotonic() > until:
            break
    rate.stop()
    ended_early = child.process.poll()
    child.kill()  # what it would still do is to wait for rollouts that nobody needs
    steps = _steps(path)
    row: dict[str, Any] = {"way": way, "rank": rank, "GPUs": gpus}
    if ended_early or len(steps) <= SKIP:
        return {**row, "why not": _last_error(child.log_path)}
    return {**row, **figures(steps, rate), "per step": [_kept(step) for step in steps]}


def _steps(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [step for step in steps if "reward" in step]


def figures(steps: list[dict[str, Any]], rate: TokenRate) -> dict[str, Any]:
    """Medians over the steps after the first few."""
    warm = steps[SKIP:]

    def values(name: str) -> list[float]:
        return [step[name] for step in warm if step.get(name) is not None]

    def median(name: str, scale: float = 1.0) -> float | None:
        found = values(name)
        return statistics.median(found) * scale if found else None

    return {
        "steps": len(steps),
        "optimizer blocked a sync, ms": median("perf/weight_sync_s", 1e3),
        "blocked worst, ms": max(values("perf/weight_sync_s")) * 1e3,
        "step, s": median("perf/step_s"),
        "rollout wait, s": median("perf/rollout_wait_s"),
        "generated tokens/s": rate.between(warm[0]["time"], warm[-1]["time"]),
        "reward first 5": statistics.fmean(step["reward"] for step in steps[:5]),
        "reward last 5": statistics.fmean(step["reward"] for step in steps[-5:]),
        "ratio min": min(values("ratio")),
        "ratio max": max(values("ratio")),
        "ready after, ms": median("bucket/ready_s", 1e3),
    }


def _kept(step: dict[str, Any]) -> dict[str, float]:
    names = (
        "perf/weight_sync_s", "perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "reward",
        "ratio", "bucket/snapshot_s", "bucket/wait_s", "bucket/ready_s", "bucket/lag",
        "perf/weight_sync_pause_s", "perf/weight_sync_transfer_s", "sample/dropped_stale_total",
    )  # fmt: skip
    return {name: round(step[name], 5) for name in names if isinstance(step.get(name), float)}


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if "Error" in line or "error" in line]
    return (lines[-1] if lines else "it ended early")[-300:]


if __name__ == "__main__":
    main()

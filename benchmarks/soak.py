"""A long run on one machine: 200 versions, one replica restarted every 40 of them.

``python -m benchmarks.soak`` trains the demo's policy over a folder with two replicas and the
proxy, ends replica 2 with SIGKILL after every 40 versions and starts it again, and samples the
resident memory of every process. It fails if versions go back, if a rollout is lost, or if memory
grows after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
from collections import defaultdict
from pathlib import Path

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from demo.fleet import Server, start_proxy, start_replica, start_trainer, wait_healthy
from demo.observe import read_metrics
from demo.processes import Processes
from demo.summary import series, steps_only
from demo.tiny_model import build

RESTART_EVERY = 40
WARM_UP = 0.4
"""Share of the samples before memory must be flat: allocators and caches fill first."""
GROWTH_MIB = 40.0
"""Least growth that counts, from the first third after the warm-up to the last third."""

SMALL_CACHE = ("--num-gpu-blocks-override", "1024")
"""KV cache blocks: pages of a cache count as resident once they were used, so a cache that fills
during the run would look like a leak."""

_LOST = re.compile(r"(giving up|lost rollout|Traceback)", re.IGNORECASE)


class Memory:
    """Resident memory of process trees by name, MiB."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    def sample(self, pids: dict[str, int]) -> None:
        """Add one sample for each process that is still there, its children included."""
        for name, pid in pids.items():
            try:
                root = psutil.Process(pid)
                tree = [root, *root.children(recursive=True)]
                self.samples[name].append(sum(one.memory_info().rss for one in tree) / 2**20)
            except psutil.NoSuchProcess:
                continue

    def course(self, name: str) -> list[int]:
        """Ten points of the whole way, MiB."""
        values = self.samples[name]
        return [round(values[len(values) * tenth // 10]) for tenth in range(10)]

    def growth(self, name: str) -> float:
        """Median of the last third minus that of the first third, after the warm-up."""
        values = self.samples[name]
        values = values[int(len(values) * WARM_UP) :]
        third = max(len(values) // 3, 1)
        return statistics.median(values[-third:]) - statistics.median(values[:third])


def failed_generations(proxy: Server) -> int:
    """Generations that the proxy could answer by no replica."""
    text = requests.get(f"{proxy.url}/metrics", timeout=5).text
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "bucket_lora_proxy_requests_total"
        and sample.labels.get("status", "").startswith("5")
    )


def soak(out: Path, versions: int) -> dict[str, object]:
    """Run it; figures and faults."""
    for stale in ("bucket", "logs", "trainer"):
        shutil.rmtree(out / stale, ignore_errors=True)
    model, bucket = build(out / "model"), f"file://{out / 'bucket'}"
    memory, restarts = Memory(), 0
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        replicas = {
            name: start_replica(processes, name, model, bucket, *SMALL_CACHE)
            for name in ("replica-1", "replica-2")
        }
        proxy = start_proxy(processes, list(replicas.values()))
        wait_healthy(processes, [*replicas.values(), proxy])
        trainer = start_trainer(
            processes, model, proxy.url, out / "trainer",
            "--bucket", bucket, "--run-id", "soak", "--steps", str(versions),
        )  # fmt: skip
        metrics = out / "trainer" / "metrics.jsonl"

        def step() -> bool:
            nonlocal restarts
            done = len(steps_only(read_metrics(metrics)))
            pids = {
                "trainer": trainer,
                "proxy": proxy.child,
                "replica-1": replicas["replica-1"].child,
            }
            memory.sample({name: child.pid for name, child in pids.items()})
            if done // RESTART_EVERY > restarts and done < versions:
                restarts += 1
                old = replicas["replica-2"]
                old.child.kill()
                port = int(old.url.rpartition(":")[2])
                replicas["replica-2"] = start_replica(
                    processes, f"replica-2.{restarts}", model, bucket, *SMALL_CACHE, port=port
                )
            return trainer.process.poll() is not None

        processes.wait_until(
            "the training", step, timeout_s=3600,
            watch=[proxy.child, replicas["replica-1"].child],
        )  # fmt: skip
        failed = failed_generations(proxy)
        log = trainer.log_path.read_text(errors="replace")
    rows = steps_only(read_metrics(metrics))
    published = series(rows, "bucket/version")
    faults = [
        *(
            [f"the trainer ended with {trainer.process.returncode}"]
            if trainer.process.returncode
            else []
        ),
        *([f"{len(rows)} steps of {versions}"] if len(rows) != versions else []),
        *(["versions went back"] if published != sorted(set(published)) else []),
        *([f"{failed} generations failed at the proxy"] if failed else []),
        *([f"in the trainer's log: {found.group()}" for found in [_LOST.search(log)] if found]),
    ]
    growth = {name: round(memory.growth(name), 1) for name in memory.samples}
    faults += [f"{name} grew by {mib} MiB" for name, mib in growth.items() if mib > GROWTH_MIB]
    return {
        "versions": len(published), "restarts": restarts, "failed generations": failed,
        "dropped as stale": int(sum(series(rows, "sample/dropped_stale_total"))),
        "growth after warm-up, MiB": growth,
        "memory on the way, MiB": {name: memory.course(name) for name in memory.samples},
        "samples": len(memory.samples["proxy"]), "faults": faults,
    }  # fmt: skip


def main() -> None:
    """Run, print, and exit 1 on any fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("demo-out/soak"))
    options = parser.parse_args()
    result = soak(options.out.resolve(), options.versions)
    print(json.dumps(result, indent=1))
    raise SystemExit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()

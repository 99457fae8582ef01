"""A long run on one machine: 200 versions, one replica restarted every 40 of them.

``python -m benchmarks.soak`` trains the demo's policy over a folder with two replicas and the
proxy. Replica 2 is ended with SIGKILL after every 40 versions, and never before it has answered
again. It fails if versions go back, if a rollout is lost, if a restart was not lived through, or if
the memory of a process that stays grows with the versions (``flatness``).

Replica 1 gets the same rollouts before and after the training, without a trainer and without new
versions: what it grows by then is not the versions' doing. What vLLM's worker grows by on a CPU
whatever it serves (decision 85) is kept from it by ``BOUNDED``; ``--unbounded`` leaves it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.flatness import Stretch, Verdict, judge
from benchmarks.process_memory import tree_memory
from benchmarks.soak_fleet import Mortal, ReadyOrder, Rollouts, answered, counted
from demo.fleet import Server, start_proxy, start_replica, start_trainer, wait_healthy
from demo.observe import read_metrics
from demo.processes import Child, Processes
from demo.summary import series, steps_only
from demo.tiny_model import build
from tests.integration.plugin.tiny_model import make_adapter

RUN_ID = "soak"
SAMPLE_S = 2.0
LEAST_STEP_S = 1.5
"""A step takes some 0.7 s here, a start of vLLM 40: a replica must be back within 40 versions."""
WARM_UP = 0.25
"""Share of the training before the memory of trainer and proxy must be flat."""
STILL = 4000
"""Rollouts without new versions, before and after the training each."""
BOUNDED = {
    # oneDNN keeps a primitive for each shape of a batch that it ever met, up to 1024 by default.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "2",
    # glibc raises both by itself, so that ever larger temporaries come from its heap, and stay.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""For replicas: nothing fills for thousands of requests, so that a leak of a few MiB shows."""
SMALL_CACHE = ("--num-gpu-blocks-override", "1024")
"""KV cache blocks: pages of a cache count once they were used, so a cache that fills during the run
would look like a leak."""

_NUMBERS = re.compile(r"\[[-\s\d.,]+\]")
"""Lists of numbers, which are printed on one line each."""
_LOST = re.compile(r"(giving up|lost rollout|Traceback)", re.IGNORECASE)


@dataclass
class Course:
    """Memory on the way, by process, for one stretch."""

    work: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _next: float = 0.0

    def due(self) -> bool:
        """Whether it is time for the next sample."""
        return time.monotonic() >= self._next

    def sample(self, trees: dict[str, tuple[int, float]]) -> None:
        """Add a sample of these trees: process id of the root, and what it has done so far."""
        for name, mib in tree_memory({name: pid for name, (pid, _) in trees.items()}).items():
            root = max((tree for tree in trees if name.startswith(tree)), key=len)
            self.work[name].append(trees[root][1])
            self.mib[name].append(mib)
        self._next = time.monotonic() + SAMPLE_S

    def stretch(self, name: str, *, skip: float = 0.0) -> Stretch:
        """The course of one process, without its first part."""
        start = int(len(self.mib[name]) * skip)
        return Stretch(self.work[name][start:], self.mib[name][start:])

    def points(self, name: str) -> list[int]:
        """Ten points of the whole way and its end, MiB."""
        values = self.mib[name]
        return [round(values[(len(values) - 1) * tenth // 10]) for tenth in range(11)]


@dataclass
class Soak:
    """Everything that runs, and what was seen of it."""

    processes: Processes
    steady: Server
    mortal: Mortal
    proxy: Server
    rollouts: Rollouts
    metrics: Path
    order: ReadyOrder = field(default_factory=lambda: ReadyOrder(RUN_ID))
    before: Course = field(default_factory=Course)
    training: Course = field(default_factory=Course)
    after: Course = field(default_factory=Course)

    def still(self, course: Course, count: int) -> None:
        """The steady replica answers rollouts of one version."""

        def look() -> None:
            if course.due():
                course.sample({"replica-1": (self.steady.child.pid, answered(self.steady))})

        self.rollouts.send(self.steady, count, look)

    def train(self, trainer: Child) -> None:
        """Look at everything until the trainer ends."""

        def look() -> bool:
            if self.training.due():
                version = len(steps_only(read_metrics(self.metrics)))
                self.mortal.look(version)
                for replica in (self.steady, self.mortal.server):
                    self.order.look(replica)
                if trainer.process.poll() is None:
                    self.training.sample(
                        {
                            "trainer": (trainer.pid, version),
                            "proxy": (self.proxy.child.pid, version),
                            "replica-1": (self.steady.child.pid, answered(self.steady)),
                        }
                    )
            return trainer.process.poll() is not None

        watch = [self.proxy.child, self.steady.child]
        self.processes.wait_until("the training", look, timeout_s=3600, watch=watch)

    def verdicts(self) -> dict[str, Verdict]:
        """By process: all that were there for the whole training."""
        longest = max(map(len, self.training.mib.values()))
        found = {}
        for name, values in self.training.mib.items():
            if len(values) > longest / 2:
                without = [
                    course.stretch(name)
                    for course in (self.before, self.after)
                    if name in course.mib
                ]
                found[name] = judge(self.training.stretch(name, skip=WARM_UP), *without)
        return found


def soak(out: Path, versions: int, *, still: int, bounded: bool, every: int = 40) -> dict[str, Any]:
    """Run it; figures and faults."""
    for stale in ("bucket", "logs", "trainer"):
        shutil.rmtree(out / stale, ignore_errors=True)
    model, folder = build(out / "model"), out / "bucket"
    folder.mkdir(parents=True)
    bucket = folder.as_uri()
    with Processes(out / "logs", lambda _name, _line: None) as processes:

        def replica(name: str, port: int | None = None) -> Server:
            env = BOUNDED if bounded else {}
            return start_replica(processes, name, model, bucket, *SMALL_CACHE, port=port, env=env)

        rollouts = Rollouts(model, folder, make_adapter(model, 1))
        steady, mortal = (
            replica("replica-1"),
            Mortal(replica("replica-2"), replica, every, versions),
        )
        proxy = start_proxy(processes, [steady, mortal.server])
        wait_healthy(processes, [steady, mortal.server, proxy])
        metrics = out / "trainer" / "metrics.jsonl"
        seen = Soak(processes, steady, mortal, proxy, rollouts, metrics)
        seen.still(seen.before, still)
        trainer = start_trainer(
            processes, model, proxy.url, out / "trainer", "--bucket", bucket, "--run-id", RUN_ID,
            "--steps", str(versions), "--least-step-s", str(LEAST_STEP_S),
        )  # fmt: skip
        seen.train(trainer)
        failed = counted(proxy, "bucket_lora_proxy_requests_total", status="5")
        seen.still(seen.after, still)
        return report(seen, trainer, versions, failed)


def report(seen: Soak, trainer: Child, versions: int, failed: int) -> dict[str, Any]:
    """Figures of a soak, and what of them must not be."""
    rows = steps_only(read_metrics(seen.metrics))
    published, mortal = series(rows, "bucket/version"), seen.mortal
    lost = _LOST.search(trainer.log_path.read_text(errors="replace"))
    wanted = (versions - 1) // mortal.every
    verdicts = seen.verdicts()
    faults = [*seen.order.faults]
    checks: list[tuple[bool, str]] = [
        (not trainer.process.returncode, f"the trainer ended with {trainer.process.returncode}"),
        (len(rows) == versions, f"{len(rows)} steps of {versions}"),
        (published == sorted(set(published)), "versions went back"),
        (not failed, f"{failed} generations failed at the proxy"),
        (not lost, f"in the trainer's log: {lost.group() if lost else ''}"),
        (
            len(mortal.served) >= wanted,
            f"{len(mortal.served)} of {wanted} restarted replicas answered again",
        ),
        *(
            (one.flat, f"{name} grew by {one.by_versions_mib:.1f} MiB")
            for name, one in verdicts.items()
        ),
    ]
    faults += [text for good, text in checks if not good]
    return {
        "versions": len(published), "failed generations": failed,
        "killed at version, served again at": list(zip(mortal.kills, mortal.served, strict=False)),
        "dropped as stale": int(sum(series(rows, "sample/dropped_stale_total"))),
        "growth, MiB": {
            name: {
                "with versions": round(one.grown_mib, 1), "without": round(one.anyway_mib, 1),
            }
            for name, one in verdicts.items()
        },
        "on the way, MiB": {
            stretch: {name: course.points(name) for name in course.mib if name in verdicts}
            for stretch, course in (
                ("before", seen.before), ("training", seen.training), ("after", seen.after),
            )
        },
        "samples": len(seen.training.mib["proxy"]), "faults": faults,
    }  # fmt: skip


def main() -> None:
    """Run, print, and exit 1 on any fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--still", type=int, default=STILL, help="rollouts without versions")
    parser.add_argument("--unbounded", action="store_true", help="leave vLLM's caches as they are")
    parser.add_argument("--out", type=Path, default=Path("demo-out/soak"))
    options = parser.parse_args()
    result = soak(
        options.out.resolve(), options.versions, still=options.still, bounded=not options.unbounded
    )
    text = json.dumps(result, indent=1)
    print(_NUMBERS.sub(lambda found: "".join(found.group().split()).replace(",", ", "), text))
    raise SystemExit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()

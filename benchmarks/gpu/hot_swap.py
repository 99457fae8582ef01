"""What do new adapter versions cost a server under load?

    python -m benchmarks.gpu.hot_swap [--tiny] [--ranks 1,16,64] [--cases ours:2,push:2,…]

One server per rank, 128 requests in flight. Windows in which a new version comes every so many
seconds alternate with steady ones, and every second window or more often is steady. Throughput and
steps are those of the engine (``engine_log``), gaps are those between the tokens that clients get.

A case is ``<way>:<seconds between swaps>``, with ``*<n>`` for n windows in each round. Ways:
``ours`` (bucket, as shipped), ``parts``, ``prepared`` and ``in-loop`` (bucket, older ways of
loading: see ``probe``), ``push`` and ``pause`` (TRL's calls, without and with a
pause), ``mix`` (no load: requests name versions in turn, as they do after swaps).

Every window is written as it ends, so that an interrupted run keeps what it has: see
``swap_summary``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu import engine_log, replica, report, shapes, swap_summary
from benchmarks.gpu.contenders import Adapters, Bucket, Push
from benchmarks.gpu.swap_window import Run, Setting
from demo.processes import Processes

CASES = "ours:2*3,ours:0.5*3,mix:2,mix:0.5,push:2,push:0.5,pause:2,pause:0.5"
OLD_CASES = "parts:2*2,parts:0.5,in-loop:2,prepared:2"
"""Older ways of loading; measured at the largest rank only."""

GPU = Setting(
    "1.5B", "bfloat16", 128, 16, 128, 256, 6.0, 2.0,
    ("--load-format=dummy", "--dtype=bfloat16", "--max-model-len=1024",
     # No step is larger than the largest CUDA graph, or a few prompts together would make one
     # that takes ten times as long, with or without swaps.
     "--max-num-seqs=256", "--max-num-batched-tokens=512",
     "--max-loras=20",  # room for both windows, else one contender's loads evict the other's
     "--gpu-memory-utilization=0.28",
     "--kv-cache-memory-bytes=16G", "--no-enable-prefix-caching"),
)  # fmt: skip
TINY = Setting(
    "tiny", "float32", 8, 4, 16, 32, 1.5, 0.3,
    ("--load-format=dummy", *replica.CPU_FLAGS, "--max-loras=20"),
)  # fmt: skip


def main() -> None:
    """Measure all cases on all ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--ranks", help="default 64,16,1; --tiny: 8")
    parser.add_argument("--cases", default=CASES, help=f"default {CASES}")
    parser.add_argument("--old-cases", default=OLD_CASES, help="more of them for the largest rank")
    parser.add_argument("--rounds", type=int, help="default 3; --tiny: 1")
    parser.add_argument("--window-s", type=float)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no window after this")
    parser.add_argument("--name", default="hot_swap", help="of the files written")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--vllm-flag", action="append", default=[], help="more of them")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/benchmark-logs"))
    options = parser.parse_args()
    setting = TINY if options.tiny else GPU
    setting.window_s = options.window_s or setting.window_s
    options.rounds = options.rounds or (1 if options.tiny else 3)
    ranks = [int(r) for r in (options.ranks or ("8" if options.tiny else "64,16,1")).split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}_windows.jsonl"
    with path.open("w", buffering=1) as file:
        measure(ranks, setting, options, file)
    windows = [json.loads(line) for line in path.read_text().splitlines()]
    report.finish(options.name, swap_summary.COLUMNS, swap_summary.summary(windows), options.out)


def measure(ranks: list[int], setting: Setting, options: argparse.Namespace, out: TextIO) -> None:
    """Write all windows of the cases of every rank, in the order in which they were measured."""
    deadline = time.monotonic() + options.seconds
    problems: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Processes(options.logs, lambda _name, _line: None) as processes,
    ):
        work = Path(folder)
        model = shapes.write_served_model(work / "model", setting.shape, setting.dtype)
        for rank in ranks:  # one each: a server gives its slots to every run that it finds
            (work / f"bucket{rank}").mkdir()
        servers = {
            rank: replica.start(
                processes, f"rank{rank}", model, bucket=work / f"bucket{rank}", max_lora_rank=rank,
                flags=(*setting.flags, *options.vllm_flag), work=work, cpu=options.tiny,
            )
            for rank in ranks
        }  # fmt: skip
        adapters = {r: Adapters(setting.shape, r, setting.dtype, work / "push") for r in ranks}
        replica.wait_healthy(processes, list(servers.values()))
        print(f"healthy after {options.seconds - deadline + time.monotonic():.0f} s", flush=True)
        for place, (rank, server) in enumerate(servers.items()):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(ranks) - place)
            run = Run(
                server, rank, setting,
                Bucket(server.url, work / f"bucket{rank}", f"rank{rank}", model, adapters[rank]),
                Push(server.url, adapters[rank]),
            )  # fmt: skip
            cases = sequence(options.cases, options.old_cases if rank == max(ranks) else "")
            longest_s = 0.0
            for round_, case in itertools.takewhile(lambda c: c[0] < options.rounds, cases):
                started = time.monotonic()
                if started + longest_s > until:
                    print(f"rank {rank}: out of time in round {round_}", flush=True)
                    break
                line = json.dumps(_rounded(run.window(case)))
                out.write(line + "\n")
                print(line[:300], flush=True)
                longest_s = max(longest_s, time.monotonic() - started)
            try:
                run.stop()
            except RuntimeError as error:  # the other ranks are still worth their time
                problems.append(f"rank {rank}: {error}")
            steps = server.probe_dir / engine_log.STEPS
            shutil.copy(steps, options.logs / f"rank{rank}-{engine_log.STEPS}")
    if problems:
        raise RuntimeError("; ".join(problems))


def sequence(*cases: str) -> Iterator[tuple[int, str]]:
    """Round and case of every window, for ever: cases in random order, steady ones between."""
    drawn: list[str] = []
    for case in ",".join(filter(None, cases)).split(","):
        name, _, times = case.partition("*")
        drawn += [name] * int(times or 1)
    for round_ in itertools.count():
        for place, case in enumerate(random.Random(round_).sample(drawn, len(drawn))):
            if place % 2 == 0:
                yield round_, swap_summary.STEADY
            yield round_, case
        yield round_, swap_summary.STEADY


def _rounded(window: dict[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return round(value, 3) if isinstance(value, float) else value

    return {key: short(value) for key, value in window.items()}


if __name__ == "__main__":
    main()

"""What do new adapter versions cost a server under load?

    python -m benchmarks.gpu.hot_swap [--tiny] [--ranks 1,16,64] [--cases steady,ours:2,push:2,…]

One server per rank, 128 requests in flight. Windows without swaps alternate with windows in which a
new version comes every so many seconds; throughput is vLLM's own token counter, and a change is the
median over the rounds, each compared with the steady windows of the same round.

A case is ``<way>:<seconds between swaps>``. Ways: ``ours`` (bucket, adapters staged beside the
engine loop), ``prepared`` and ``in-loop`` (the bucket, with older ways of loading: see ``probe``),
``push`` and ``pause`` (TRL's calls, without and with a pause).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import probe, replica, report, shapes
from benchmarks.gpu.contenders import Adapters, Bucket, Push, check_answers
from demo.processes import Processes

COLUMNS = (
    "rank", "case", "windows", "tokens/s", "change, %", "gap p50, ms", "gap p99, ms", "gap max, ms",
    "engine loop blocked, ms", "blocked worst, ms", "swaps", "swap takes, ms", "failed",
)  # fmt: skip
CASES = "steady,ours:2,push:2,pause:2,ours:0.5,push:0.5,pause:0.5"
OLD_CASES = "steady,in-loop:2,prepared:2,in-loop:0.5,prepared:0.5"
"""Older ways of loading; measured at the largest rank only."""
WAYS = {"ours": "staged", "prepared": "prepared", "in-loop": "in-loop"}
SETTLE_S = 0.7


@dataclass
class Setting:
    """Sizes that differ between a GPU and ``--tiny``."""

    shape: str
    dtype: str
    in_flight: int
    streams: int
    prompt: int
    tokens: int
    window_s: float
    rounds: int
    flags: tuple[str, ...]


GPU = Setting(
    "1.5B", "bfloat16", 128, 16, 128, 256, 6.0, 3,
    ("--load-format=dummy", "--dtype=bfloat16", "--max-model-len=1024", "--max-loras=12",
     "--gpu-memory-utilization=0.28",
     "--kv-cache-memory-bytes=16G", "--no-enable-prefix-caching"),
)  # fmt: skip
TINY = Setting(
    "tiny",
    "float32",
    8,
    4,
    16,
    32,
    1.5,
    1,
    ("--load-format=dummy", *replica.CPU_FLAGS, "--max-loras=12"),
)


class Run:
    """One server of one rank, under load."""

    def __init__(self, server: Any, rank: int, setting: Setting, swaps: dict[str, Any]) -> None:
        self._server = server
        self._rank = rank
        self._setting = setting
        self._swaps = swaps
        self._name = swaps["ours"].swap()
        self._load = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.gpu.load", f"--url={server.url}",
                f"--in-flight={setting.in_flight}", f"--streams={setting.streams}",
                f"--prompt={setting.prompt}", f"--tokens={setting.tokens}",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._tell(f"model {self._name}")

    def window(self, case: str) -> dict[str, Any]:
        """Measure one window of a case."""
        way, _, every = case.partition(":")
        (self._server.probe_dir / "way").write_text(WAYS.get(way, probe.WAYS[0]))
        contender = self._swaps.get("ours" if way in WAYS else way)
        self._drive(contender, float(every or 0), SETTLE_S)
        self._report()
        started, tokens = time.time(), self._server.generated_tokens()
        counted_at = time.perf_counter()
        takes = self._drive(contender, float(every or 0), self._setting.window_s)
        tokens = self._server.generated_tokens() - tokens
        seconds = time.perf_counter() - counted_at
        loads = [line["ms"] for line in self._loads() if line["time"] >= started]
        return {
            "rank": self._rank, "case": case, "tokens/s": tokens / seconds, "seconds": seconds,
            "loads_ms": loads, "swaps_ms": takes, **self._report(),
        }  # fmt: skip

    def stop(self) -> None:
        """End the load, and check that what was measured also serves the right weights."""
        assert self._load.stdin is not None
        self._load.stdin.close()
        self._load.wait(timeout=30)
        (self._server.probe_dir / "way").write_text(probe.WAYS[0])
        prompt = [5 + number % 200 for number in range(self._setting.prompt)]
        check_answers(self._server.url, self._swaps["ours"], self._swaps["push"], prompt)

    def _drive(self, contender: Any, every_s: float, seconds: float) -> list[float]:
        """Swap every so often; how long each swap took, in ms."""
        takes: list[float] = []
        until = time.perf_counter() + seconds
        due = time.perf_counter() + every_s / 2
        while (now := time.perf_counter()) < until:
            if contender is None or due > now:
                time.sleep(min(until - now, max(0.001, due - now if contender else until - now)))
                continue
            due = max(due + every_s, now)
            self._tell(f"model {contender.swap()}")
            takes.append((time.perf_counter() - now) * 1e3)
        return takes

    def _tell(self, line: str) -> None:
        assert self._load.stdin is not None
        self._load.stdin.write(line + "\n")
        self._load.stdin.flush()

    def _report(self) -> dict[str, Any]:
        assert self._load.stdout is not None
        self._tell("report")
        answer: dict[str, Any] = json.loads(self._load.stdout.readline())
        return answer

    def _loads(self) -> list[dict[str, Any]]:
        path = self._server.probe_dir / "loads.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Measure all cases on all ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--ranks", help="default 1,16,64; --tiny: 8")
    parser.add_argument("--cases", default=CASES, help=f"default {CASES}")
    parser.add_argument("--old-cases", default=OLD_CASES, help="more of them for the largest rank")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--window-s", type=float)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no round after this")
    parser.add_argument("--name", default="hot_swap", help="of the JSON file")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--vllm-flag", action="append", default=[], help="more of them")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/benchmark-logs"))
    options = parser.parse_args()
    setting = TINY if options.tiny else GPU
    setting.rounds = options.rounds or setting.rounds
    setting.window_s = options.window_s or setting.window_s
    ranks = [int(r) for r in (options.ranks or ("8" if options.tiny else "1,16,64")).split(",")]
    cases = {rank: options.cases.split(",") for rank in ranks}
    cases[max(ranks)] += [case for case in options.old_cases.split(",") if case]
    windows = measure(cases, setting, options)
    rows = summary(windows)
    report.finish(options.name, COLUMNS, rows, options.out)
    (options.out / f"{options.name}_windows.json").write_text(
        "[\n" + ",\n".join(json.dumps(_rounded(window)) for window in windows) + "\n]\n"
    )


def measure(
    cases: dict[int, list[str]], setting: Setting, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All windows of the cases of every rank, in the order in which they were measured."""
    ranks = list(cases)
    deadline = time.monotonic() + options.seconds
    windows: list[dict[str, Any]] = []
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
            share = len(cases[rank]) / sum(len(cases[later]) for later in ranks[place:])
            until = time.monotonic() + (deadline - time.monotonic()) * share
            run = Run(
                server, rank, setting,
                {
                    "ours": Bucket(
                        server.url, work / f"bucket{rank}", f"rank{rank}", model, adapters[rank]
                    ),
                    "push": Push(server.url, adapters[rank], pause=False),
                    "pause": Push(server.url, adapters[rank], pause=True),
                },
            )  # fmt: skip
            run.window("steady")
            windows += _rounds(run, cases[rank], setting.rounds, until)
            run.stop()
    return windows


def _rounds(run: Run, cases: list[str], rounds: int, until: float) -> list[dict[str, Any]]:
    windows: list[dict[str, Any]] = []
    longest_s = 0.0
    for round_ in range(rounds):
        started = time.monotonic()
        if round_ and started + longest_s > until:
            print(f"out of time after {round_} rounds", flush=True)
            break
        order = random.Random(round_).sample(cases, len(cases))
        for case in order:
            windows.append({"round": round_, **run.window(case)})
            print(json.dumps(_rounded(windows[-1]))[:400], flush=True)
        longest_s = max(longest_s, time.monotonic() - started)
    return windows


def summary(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per rank and case, medians over its windows."""
    rows = []
    for rank, case in dict.fromkeys((w["rank"], w["case"]) for w in windows):
        mine = [w for w in windows if (w["rank"], w["case"]) == (rank, case)]
        changes = [(w["tokens/s"] / _steady(windows, w) - 1) * 100 for w in mine]
        loads = [ms for w in mine for ms in w["loads_ms"]]
        takes = [ms for w in mine for ms in w["swaps_ms"]]
        rows.append(
            {
                "rank": rank,
                "case": case,
                "windows": len(mine),
                "tokens/s": statistics.median(w["tokens/s"] for w in mine),
                "change, %": None if case == "steady" else statistics.median(changes),
                "gap p50, ms": statistics.median(w["gap_p50_ms"] for w in mine),
                "gap p99, ms": statistics.median(w["gap_p99_ms"] for w in mine),
                "gap max, ms": max(w["gap_max_ms"] for w in mine),
                "engine loop blocked, ms": statistics.median(loads) if loads else None,
                "blocked worst, ms": max(loads, default=None),
                "swaps": len(takes),
                "swap takes, ms": statistics.median(takes) if takes else None,
                "failed": sum(w["failed"] for w in mine),
            }
        )
    return sorted(rows, key=lambda row: row["rank"])


def _steady(windows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    of_round = [
        w["tokens/s"]
        for w in windows
        if (w["rank"], w["round"], w["case"]) == (like["rank"], like["round"], "steady")
    ]
    return statistics.fmean(of_round) if of_round else float("nan")


def _rounded(window: dict[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return round(value, 3) if isinstance(value, float) else value

    return {key: short(value) for key, value in window.items()}


if __name__ == "__main__":
    main()

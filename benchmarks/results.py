"""What a benchmark leaves behind: the machine, the versions, the commit and its rows, as JSON.

By default a run writes to ``.benchmarks``, which git ignores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IGNORED = ROOT / ".benchmarks"
PACKAGES = ("trl-async-bucket", "torch", "trl", "peft", "vllm", "boto3", "pydantic", "safetensors")

LOAD_BEFORE = round(os.getloadavg()[0], 1)
"""Taken at import: at the end it would be the benchmark's own."""


def arguments(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark with a JSON file has."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--tiny", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=IGNORED, help="folder of the JSON file")
    return parser


def environment() -> dict[str, Any]:
    """Machine, load, versions, commit and command."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name if spec else Path(sys.argv[0]).name
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": LOAD_BEFORE,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "command": " ".join(["python", "-m", name, *_without_folder(sys.argv[1:])]),
    }


def write(name: str, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Print the rows as Markdown and write them to ``<out>/<name>.json``; returns the path."""
    print(table(list(rows[0]), rows), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(environment(), indent=1)
    path.write_text(f'{{"environment": {head},\n"rows": [\n{lines}\n]}}\n')
    print(f"written to {path}", flush=True)
    return path


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A figure with as many digits as mean something."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 10 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def median(values: Sequence[float]) -> float:
    """Median to four digits: more would claim more than a clock knows."""
    return digits(statistics.median(values))


def median_ms(values_s: Sequence[float]) -> float:
    """The same in milliseconds, of seconds."""
    return digits(1000 * statistics.median(values_s))


def digits(value: float) -> float:
    """Four digits of it."""
    return float(f"{value:.4g}")


def _without_folder(arguments: Sequence[str]) -> Iterator[str]:
    """All but ``--out DIR``, which changes no figure."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--out":
            next(rest, None)
        else:
            yield argument


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the tree that is measured; ``None`` outside a clone, and on a machine without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

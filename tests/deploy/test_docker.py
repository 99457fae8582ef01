"""The Dockerfiles are free of lint, and copy and start what there is. Building needs a daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).parent / "hadolint"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    # DL3013 wants versions pinned in `pip install`: those stand in pyproject.toml.
    done = subprocess.run(
        [HADOLINT, "--ignore", "DL3013", "--format", "json", dockerfile],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    findings = [(row["line"], row["code"], row["message"]) for row in json.loads(done.stdout)]
    assert not findings


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_it_copies_all_that_the_wheel_is_made_of(dockerfile: Path) -> None:
    """A new top-level package that an image lacks would fail at its build only."""
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile.read_text(), re.MULTILINE):
        copied |= set(line.split()[:-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    homes = setuptools["package-dir"]
    packages = {name.partition(".")[0] for name in setuptools["packages"]}
    needed = {homes.get(package, package) for package in packages}
    assert copied >= needed | {"pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_it_installs_extras_that_exist(dockerfile: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (installed,) = re.findall(r'"\$\{wheel\}\[(.*?)\]"', dockerfile.read_text())
    assert set(installed.split(",")) <= set(extras)


def test_the_replica_image_is_a_vllm_that_the_tests_ran_with() -> None:
    text = (ROOT / "deploy" / "docker" / "replica.Dockerfile").read_text()
    (image,) = re.findall(r"^ARG VLLM=v(\S+)$", text, re.MULTILINE)
    set_up = (ROOT / "scripts" / "set_up.py").read_text()
    assert f'VLLM = "{image}"' in set_up

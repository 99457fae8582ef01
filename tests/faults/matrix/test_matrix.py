"""A few cells of the matrix, as its command runs them; ``make faults`` runs all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.matrix.cells import CI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 700.0
"""Far above what it takes: some two minutes on two free cores."""


def test_a_run_goes_on_through_faults_and_its_records_prove_it(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [
        sys.executable, "-m", "tests.faults.matrix", "--cells", ",".join(CI),
        "--hold-factor", "0.3", "--out", str(tmp_path / "out"), "--json", str(file),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends everything it started
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said[-5000:]
    results = json.loads(file.read_text())
    outcomes = {key: cell["outcome"] for key, cell in results["cells"].items()}
    assert outcomes == {
        "kill/trainer:publish": "went on after restart",
        "corrupt/store:publish": "went on",
        "cut/trainer-store:snapshot": "went on",
        "503/store:checkpoint": "went on",
    }
    logs = [log.read_text() for log in (tmp_path / "out" / "logs").iterdir()]
    assert any("is passed over: " in log for log in logs)  # the version that was damaged
    (run,) = results["runs"].values()
    assert run["problems"] == []
    assert run["recomputed"] == min(run["completions"], 1500) > 50
    # Otherwise the comparison would have proved nothing.
    assert run["told_apart"] > 0.8
    assert run["trained"] > 30

"""The newest vLLM, and an older one with the same torch; `scripts/vllm_matrix.py` tries more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from adapter_bucket.status import ProbeResult, ReadyState
from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import Server, running_server
from tests.integration.plugin.test_serving import PROMPT, assert_not_served, assert_serves_truth

pytestmark = pytest.mark.slow

WAIT_S = 30.0


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0"])
def test_versions_are_probed_swapped_and_retired(version: str, base: Path, tmp_path: Path) -> None:
    folder = Path(sys.prefix) / f"vllm-{version}"
    if not (folder / "complete").exists():
        pytest.skip(f"scripts/vllm_matrix.py --prepare {version} was not run, or had no network")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    flags = [
        "--plugin=bucket-lora",
        f"--bucket-lora-url=file://{bucket}",
        f"--bucket-lora-cache-dir={tmp_path / 'cache'}",
    ]
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    with running_server(str(base), tmp_path / "server.log", flags, PYTHONPATH=path) as server:
        assert server.status().vllm_version == version
        check(server, TestRun(bucket, base, "run", window=2))


def check(server: Server, run: TestRun) -> None:
    for number in (1, 2, 3):
        name = run.publish(number, probe=run.true_probe(number, PROMPT))
        about = server.status(name, wait_s=WAIT_S).adapter
        assert about is not None
        assert (about.state, about.probe) == (ReadyState.READY, ProbeResult.PASSED), about
        assert_serves_truth(server, run, number)
    assert server.status().runs[run.run_id].ready == [2, 3]
    assert_not_served(server, run.name(1))
    about = server.status(run.publish(4, probe=run.true_probe(1, PROMPT)), wait_s=WAIT_S).adapter
    assert about is not None
    assert (about.state, about.probe) == (ReadyState.REFUSED, ProbeResult.FAILED), about
    run.publish(5)
    assert_serves_truth(server, run, 5)  # waits for its version

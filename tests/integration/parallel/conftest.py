"""All runs of two ranks, one after the other in the same two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parallel.failing import S3_ENDPOINT, S3_URL
from tests.integration.parallel.overlay import overlay
from tests.integration.parallel.setups import SETUPS
from tests.s3_servers import S3Server, seaweed, seaweed_pair

__all__ = ["seaweed", "seaweed_pair"]

ROOT = Path(__file__).parents[3]
FAILURES = ("no-adapters", "only-503")


@dataclass
class Runs:
    """What the ranks wrote."""

    out: Path
    s3_url: str

    def report(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What a rank found."""
        path = self.out / name / f"report-{rank}.json"
        if not path.exists():
            logs = sorted((self.out / name).glob("rank-*.log"))
            tails = [f"{log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
            raise AssertionError("\n".join(tails) or f"{name} did not even begin")
        report: dict[str, Any] = json.loads(path.read_text())
        return report


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory, seaweed: S3Server) -> Iterator[Runs]:
    out = tmp_path_factory.mktemp("parallel")
    short = {"connect_timeout_s": "1", "read_timeout_s": "1", "deadline_s": "2"}
    s3_url = seaweed.url(seaweed.new_bucket(), **short)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(overlay())]
    environment = {
        **os.environ,
        **seaweed.environment,
        S3_URL: s3_url,
        S3_ENDPOINT: seaweed.endpoint,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        sys.executable, "-m", "tests.integration.parallel.worker", "--out", str(out),
        *SETUPS, *FAILURES,
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": rank}, cwd=ROOT) for rank in "01"
    ]
    try:
        for rank in ranks:
            assert rank.wait(400) == 0
        yield Runs(out, s3_url)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()

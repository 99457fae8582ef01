"""One engine whose model is split over several worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import running_server
from tests.integration.plugin.test_other_versions import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("split", ["--tensor-parallel-size=2"])
def test_versions_are_served_truly_by_a_split_model(split: str, base: Path, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    flags = [
        "--plugin=bucket-lora",
        f"--bucket-lora-url=file://{bucket}",
        f"--bucket-lora-cache-dir={tmp_path / 'cache'}",
        split,
    ]
    with running_server(str(base), tmp_path / "server.log", flags) as server:
        check(server, TestRun(bucket, base, "run", window=2))

"""Two engines behind two API servers on one port: each must serve the truth under every name."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.server import Server, running_server

pytestmark = pytest.mark.slow

PROMPT = [116, 119, 111, 32, 115, 101, 114, 118, 101, 114, 115]
REQUESTS = 16
"""Per version. The kernel deals connections out to the two processes by chance: that all of them
meet the same one has a chance of 2 in 65,536."""


def test_api_servers_that_load_in_different_orders_serve_the_same_weights(
    base: Path, bucket: Path, flags: list[str], tmp_path: Path, new_run: RunMaker
) -> None:
    run = new_run("two-servers")
    cache = tmp_path / "cache"
    flags = [*flags, f"--bucket-lora-cache-dir={cache}", "--data-parallel-size=2"]
    with running_server(str(base), tmp_path / "server.log", flags) as server:
        with stopped(_pid_of(server, "ApiServer_1")):
            for version in (1, 2, 3):  # one after the other, so that the first server loads them so
                run.publish(version)
                _wait_until(lambda v=version: v in _ready_in(cache, rank=0, run="two-servers"))
            assert _ready_in(cache, rank=1, run="two-servers") == []
        # The second server now finds all three at once, and begins with the newest.
        for version in (3, 2, 1):
            about = server.status(run.name(version), wait_s=30).adapter
            assert about is not None
            assert about.state.value == "ready", about
        log = server.log.read_text()
        assert _order(log, "ApiServer_0") == [1, 2, 3]
        assert _order(log, "ApiServer_1") == [3, 2, 1]
        for version in (1, 2, 3):
            answers = [server.generate(run.name(version), PROMPT) for _ in range(REQUESTS)]
            tokens = answers[0]["token_ids"]
            truth = run.truth(version, PROMPT + tokens)[len(PROMPT) - 1 :]
            for answer in answers:
                assert answer["token_ids"] == tokens
                assert answer["logprobs"]["token_logprobs"] == pytest.approx(truth, abs=1e-3)


def _pid_of(server: Server, process: str) -> int:
    found = re.search(rf"\({process} pid=(\d+)\)", server.log.read_text())
    assert found is not None
    return int(found[1])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _ready_in(cache: Path, *, rank: int, run: str) -> list[int]:
    """What one API server process says in its state file."""
    for path in cache.glob(f"bucket-lora-*/port-*/servers/{rank}.json"):
        state: dict[str, Any] = json.loads(path.read_text())
        if run in state["runs"]:
            ready: list[int] = state["runs"][run]["ready"]
            return ready
    return []


def _wait_until(condition: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _order(log: str, process: str) -> list[int]:
    return [int(v) for v in re.findall(rf"\({process} .*two-servers-v(\d+) is ready", log)]

"""Two API servers on one port, two engines, one of which has a disk of its own: one truth."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import Heartbeat, HeartbeatReader
from adapter_bucket.status import ProbeResult
from demo.processes import free_port
from tests.integration.plugin.conftest import RunMaker
from tests.integration.plugin.runs import TestRun
from tests.integration.plugin.server import (
    Server,
    engine_elsewhere,
    running_server,
    wait_until,
)

pytestmark = pytest.mark.slow

PROMPT = [116, 119, 111, 32, 115, 101, 114, 118, 101, 114, 115]
REQUESTS = 16
"""Per version. The kernel deals connections out to the two processes by chance: that all of them
meet the same one has a chance of 2 in 65,536."""


@pytest.mark.timeout(600)  # three commands start vLLM at once
def test_api_servers_that_load_in_different_orders_serve_the_same_weights(
    base: Path, bucket: Path, flags: list[str], tmp_path: Path, new_run: RunMaker
) -> None:
    run = new_run("two-servers")
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    both = [
        *flags,
        "--data-parallel-size=2",
        "--data-parallel-size-local=1",
        "--data-parallel-address=127.0.0.1",
        f"--data-parallel-rpc-port={free_port()}",
    ]
    here = [*both, f"--bucket-lora-cache-dir={cache}", "--api-server-count=2"]
    there = [*both, f"--bucket-lora-cache-dir={elsewhere}", "--data-parallel-start-rank=1"]
    output = tmp_path / "server.log"
    with (
        engine_elsewhere(str(base), tmp_path / "elsewhere.log", there),
        running_server(str(base), output, here, VLLM_SERVER_DEV_MODE="1") as server,
    ):
        with stopped(_pid_of(server, "ApiServer_1")):
            for version in (1, 2, 3):  # one after the other, so that the first server loads them so
                run.publish(version)
                wait_until(lambda v=version: v in _ready_in(cache, rank=0, run="two-servers"))
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
        check_probes_of_all_engines(server, run)
        served = {f"v{version:08d}" for version in (2, 3, 4)}
        wait_until(lambda: _copies(elsewhere) == served)  # the retired and the refused one go
        check_sleep(server, run)
        wait_until(lambda: _heartbeats(bucket, run, server) != [])
    # vLLM kills the API servers; their heartbeat must go all the same.
    assert _heartbeats(bucket, run, server) == [], output.read_text()[-3000:]


def _heartbeats(bucket: Path, run: TestRun, server: Server) -> list[Heartbeat]:
    """Those of one server; another test's may follow the same bucket, and so this run."""
    seen = HeartbeatReader(FileStore(bucket), run.run_id).poll().values()
    return [one.heartbeat for one in seen if one.heartbeat.url.endswith(f":{server.port}")]


def check_probes_of_all_engines(server: Server, run: TestRun) -> None:
    """Two processes probe two engines each, with and without the adapter."""
    before = _prompt_tokens(server)
    about = server.status(run.publish(4, probe=run.true_probe(4, PROMPT)), wait_s=30)
    assert about.runs[run.run_id].probes[4] is ProbeResult.PASSED, about
    wait_until(lambda: all(n >= 4 * len(PROMPT) for n in _new(before, _prompt_tokens(server))))
    about = server.status(run.publish(5, probe=run.true_probe(4, PROMPT)), wait_s=30)
    assert about.runs[run.run_id].probes[5] is ProbeResult.FAILED, about
    assert "on engine" in about.runs[run.run_id].refused[5]


def check_sleep(server: Server, run: TestRun) -> None:
    """Whichever process is told, none serves an adapter before all are loaded and probed anew."""
    server.post("/sleep?level=1", {})
    wait_until(lambda: server.status().runs[run.run_id].ready == [])
    assert "sleeps" in str(server.status().error)
    server.post("/wake_up", {})
    about = server.status(run.name(4), wait_s=30)
    assert about.runs[run.run_id].probes[4] is ProbeResult.PASSED, about


def _copies(cache: Path) -> set[str]:
    """Versions that an engine with a disk of its own keeps there."""
    return {path.name for path in cache.glob("bucket-lora-*/workers/adapters/*/v*")}


def _prompt_tokens(server: Server) -> dict[str, float]:
    """Prompt tokens that each engine has computed."""
    found = re.findall(
        r'^vllm:prompt_tokens_total\{engine="(\d)".*\} (\S+)$',
        server.text("/metrics"),
        re.MULTILINE,
    )
    return {engine: float(count) for engine, count in found}


def _new(before: dict[str, float], after: dict[str, float]) -> list[float]:
    return [after[engine] - before[engine] for engine in ("0", "1")]


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


def _order(log: str, process: str) -> list[int]:
    return [int(v) for v in re.findall(rf"\({process} .*two-servers-v(\d+) is ready", log)]

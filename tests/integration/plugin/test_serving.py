"""What a real server serves under each name, and what it refuses to."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.layout import WEIGHTS_FILE
from adapter_bucket.status import ProbeResult, ReadyState, VersionList
from tests.integration.plugin.conftest import FirstLife, RunMaker
from tests.integration.plugin.server import Server, wait_until

pytestmark = pytest.mark.slow


PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
LOGPROB_TOLERANCE = 1e-3
WAIT_S = 20.0
STAND_STILL_S = float(os.environ.get("STAND_STILL_S", "8"))
"""For how long the server is stopped."""


def vllm_version() -> str:
    return importlib.metadata.version("vllm").removesuffix("+cpu")


def assert_serves_truth(server: Server, run: Any, version: int) -> None:
    choice = server.generate(run.name(version), PROMPT)
    tokens = choice["token_ids"]
    assert tokens == run.true_tokens(version, PROMPT, len(tokens))
    truth = run.truth(version, PROMPT + tokens)[len(PROMPT) - 1 :]
    served = choice["logprobs"]["token_logprobs"]
    assert served == pytest.approx(truth, abs=LOGPROB_TOLERANCE)


def test_a_killed_server_comes_back_with_exactly_the_window(
    first_life: FirstLife, server: Server, cache_dir: Any
) -> None:
    assert server.status(first_life.run.name(2), wait_s=WAIT_S).adapter is not None
    expected = [first_life.run.name(version) for version in (2, 3, 4)]
    assert [name for name in first_life.ready if name.startswith("first-life")] == expected
    status = server.status()
    assert [name for name in status.ready if name.startswith("first-life")] == expected
    left = {path.name for path in cache_dir.iterdir()} & set(first_life.sessions)
    assert not left, "the killed server's files must not stay in memory"
    first_life.run.finish()


def test_every_version_is_served_with_its_own_weights(server: Server, new_run: RunMaker) -> None:
    run = new_run("truth")
    for version in (1, 2, 3):
        run.publish(version)
        about = server.status(run.name(version), wait_s=WAIT_S).adapter
        assert about is not None
        assert about.state is ReadyState.READY
    generated = set()
    for version in (1, 2, 3):
        assert_serves_truth(server, run, version)
        generated.add(tuple(server.generate(run.name(version), PROMPT)["token_ids"]))
    generated.add(tuple(server.generate(server.model, PROMPT)["token_ids"]))
    assert len(generated) == 4, "three versions and the base model must differ"


KINDS: dict[str, dict[str, Any]] = {
    "rank-1": {"rank": 1},
    "rank-4": {"rank": 4},
    "rank-8": {"rank": 8},
    "rank-16": {"rank": 16},
    "rank-64": {"rank": 64},
    "rslora": {"rank": 8, "use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}},
    "patterns-that-are-regexes": {
        "rank_pattern": {r"layers\.1\..*_proj": 16},
        "alpha_pattern": {r"layers\.1\..*_proj": 32},
    },
    "rslora-with-patterns": {
        "rank": 16,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 4},
        "alpha_pattern": {"down_proj": 16},
    },
    "one-module": {"target_modules": ["o_proj"]},
    "parts-of-packed-modules": {"target_modules": ["k_proj", "up_proj"]},
    "modules-by-their-whole-path": {"target_modules": ["model.layers.1.self_attn.q_proj"]},
    "modules-by-a-regex": {"target_modules": r".*layers\.0\.(self_attn\.[qv]|mlp\.down)_proj"},
    "all-linear": {"target_modules": "all-linear"},
}
"""Settings of PEFT's ``LoraConfig``. One that vLLM would scale differently is refused, see
``test_bad_adapters``."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_that_is_accepted_is_served_truly(
    server: Server, new_run: RunMaker, kind: str
) -> None:
    run = new_run(f"kind-{kind}")
    about = server.status(run.publish(1, **KINDS[kind]), wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.READY, about
    assert_serves_truth(server, run, 1)


def test_a_version_outside_the_window_is_retired_and_answers_404(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("retiring", window=1)
    run.publish(1)
    server.status(run.name(1), wait_s=WAIT_S)
    run.publish(2)
    assert server.status(run.name(2), wait_s=WAIT_S).runs["retiring"].ready == [2]
    about = server.status(run.name(1)).adapter
    assert about is not None
    assert about.state is ReadyState.RETIRED
    assert "AdapterRetiredError" in assert_not_served(server, run.name(1))


def test_a_request_that_is_ahead_of_the_server_waits_for_its_version(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("ahead")
    for version in (1, 2, 3):
        run.publish(version)
        assert_serves_truth(server, run, version)


def test_the_server_is_found_in_the_bucket_and_in_its_metrics(
    server: Server, new_run: RunMaker, bucket: Path
) -> None:
    run = new_run("seen")
    server.status(run.publish(1), wait_s=WAIT_S)
    reader = HeartbeatReader(FileStore(bucket), "seen")
    wait_until(lambda: any(s.heartbeat.status.ready == ["seen-v1"] for s in reader.poll().values()))
    beat = next(iter(reader.poll().values())).heartbeat
    assert beat.url == f"http://127.0.0.1:{server.port}"
    assert beat.replica_id == server.status().replica_id
    assert (beat.status.vllm_version, beat.status.in_flight) == (vllm_version(), 0)
    assert beat.status.plugin_version
    listed = VersionList.model_validate(server.get("/bucket_lora/versions")).versions
    (seen,) = [one for one in listed if one.run_id == "seen"]
    assert (seen.name, seen.state, seen.probe) == ("seen-v1", ReadyState.READY, ProbeResult.NONE)
    assert seen.weights_bytes == (run.path(1) / WEIGHTS_FILE).stat().st_size
    page = server.text("/metrics")
    assert 'bucket_lora_newest_ready_version{run="seen"} 1.0' in page
    assert "bucket_lora_load_seconds_bucket" in page


@pytest.mark.parametrize("name", ["truth-v99", "truth-v0", "no-such-run-v1", "truth"])
def test_an_unknown_name_never_reaches_the_base_model(server: Server, name: str) -> None:
    assert_not_served(server, name)


def assert_not_served(server: Server, name: str) -> str:
    """Check that a request is answered 404; return the body."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.generate(name, PROMPT)
    with caught.value as error:
        assert error.code == 404
        body: str = error.read().decode()
    return body


def test_a_server_that_stood_still_catches_up(server: Server, new_run: RunMaker) -> None:
    run = new_run("stood-still")
    server.status(run.publish(1), wait_s=WAIT_S)
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        for version in (2, 3, 4, 5):
            run.publish(version)
        time.sleep(STAND_STILL_S)
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    for version in (5, 4, 3):
        about = server.status(run.name(version), wait_s=WAIT_S).adapter
        assert about is not None
        assert about.state is ReadyState.READY, about
    assert_serves_truth(server, run, 5)
    assert server.status().runs[run.run_id].ready == [3, 4, 5]
    assert "AdapterRetiredError" in assert_not_served(server, run.name(2))


def test_the_status_route_needs_the_servers_key(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.get("/bucket_lora/status", key="wrong")
    with caught.value as error:
        assert error.code == 401
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.get("/bucket_lora/versions", key="wrong")
    with caught.value as error:
        assert error.code == 401
    assert server.get("/bucket_lora/status")["max_loras"] == 8


def test_the_dangerous_routes_stay_closed(server: Server) -> None:
    for path in ("/v1/load_lora_adapter", "/pause", "/collective_rpc"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post(path, {})
        with caught.value as error:
            assert error.code == 404

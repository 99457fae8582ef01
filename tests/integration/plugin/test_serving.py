"""What a real server serves under each name, and what it refuses to."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load, save

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import HeartbeatReader
from adapter_bucket.layout import WEIGHTS_FILE
from adapter_bucket.status import ProbeResult, ReadyState, VersionList
from tests.integration.plugin.conftest import FirstLife, RunMaker
from tests.integration.plugin.server import Server
from tests.integration.plugin.tiny_model import make_adapter

pytestmark = pytest.mark.slow


PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
LOGPROB_TOLERANCE = 1e-3
WAIT_S = 20.0
STAND_STILL_S = float(os.environ.get("STAND_STILL_S", "8"))
"""For how long the server is stopped."""


def vllm_version() -> str:
    return importlib.metadata.version("vllm").removesuffix("+cpu")


def _wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_serves_truth(server: Server, run: Any, version: int) -> None:
    choice = server.generate(run.name(version), PROMPT)
    tokens = choice["token_ids"]
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


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 1},
        {"rank": 16},
        {"rank": 64},
        {"rank": 8, "use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}},
        {"target_modules": ["o_proj"]},
        {"target_modules": ["k_proj", "up_proj"]},
    ],
    ids=[
        "rank-1",
        "rank-16",
        "rank-64",
        "rslora",
        "patterns",
        "one-module",
        "parts-of-packed-modules",
    ],
)
def test_every_kind_of_adapter_that_is_accepted_is_served_truly(
    server: Server, new_run: RunMaker, request: pytest.FixtureRequest, settings: dict[str, Any]
) -> None:
    run = new_run(f"kind-{request.node.callspec.id}")
    about = server.status(run.publish(1, **settings), wait_s=WAIT_S).adapter
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
    _wait_until(
        lambda: any(s.heartbeat.status.ready == ["seen-v1"] for s in reader.poll().values())
    )
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 128}, "--max-lora-rank 128"),
        ({"config": {"use_dora": True}}, "use_dora"),
        ({"config": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"config": {"bias": "all"}}, "bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_with_the_value_to_change(
    server: Server, new_run: RunMaker, change: dict[str, Any], named: str
) -> None:
    run = new_run("refused-" + "-".join(str(named).strip("-").split()).replace("_", "-"))
    name = run.publish(1, **change)
    about = server.status(name, wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert named in str(about.reason)
    assert_not_served(server, name)


def test_modules_that_the_model_lacks_are_refused(
    server: Server, new_run: RunMaker, base: Any
) -> None:
    run = new_run("renamed")
    weights, _ = make_adapter(base, 1)
    renamed = {
        name.replace("model.layers.1.", "model.decoder.1."): tensor
        for name, tensor in load(weights).items()
    }
    about = server.status(run.publish(1, weights=save(renamed)), wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert "model.decoder.1.mlp.down_proj" in str(about.reason)


def test_a_run_on_another_base_model_is_refused(server: Server, new_run: RunMaker) -> None:
    run = new_run("other-base", base_model=BaseModelRef(id="org/another-model"))
    about = server.status(run.name(1), wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert "org/another-model" in str(about.reason)


def test_corrupt_bytes_are_never_ready_and_good_versions_stay(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("corrupt")
    server.status(run.publish(1), wait_s=WAIT_S)
    about = server.status(run.publish_damaged(2), wait_s=3).adapter
    assert about is not None
    assert about.state is not ReadyState.READY
    assert "sha256" in str(about.reason)
    assert_serves_truth(server, run, 1)


def test_an_adapter_that_cannot_have_an_effect_is_refused(
    server: Server, new_run: RunMaker
) -> None:
    run = new_run("all-zero")
    weights, _ = run.make(1)
    zero = {name: 0 * t if "lora_B" in name else t for name, t in load(weights).items()}
    about = server.status(run.publish(1, weights=save(zero)), wait_s=WAIT_S).adapter
    assert about is not None
    assert about.state is ReadyState.REFUSED
    assert "zero" in str(about.reason)
    assert server.log.read_text().count("all-zero-v1 is refused") == 1


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

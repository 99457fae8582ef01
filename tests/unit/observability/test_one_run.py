"""One run through three processes: its id in every log, and each sync as one trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from adapter_bucket.trace_ids import root_span_id, trace_id
from demo.processes import free_port

RUN = "observed-run"
TOKEN = "a-token-that-no-log-may-show"
PATIENCE_S = 60.0
CLOCKS_S = 0.005
"""Two processes read the same two clocks, one after the other."""


@dataclass
class Seen:
    logs: dict[str, list[dict[str, Any]]]
    spans: list[dict[str, Any]]
    metrics: str
    top: dict[str, Any]
    everything: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("observed")
    bucket, spans = f"file://{out}/bucket", out / "spans.jsonl"
    (out / "bucket").mkdir()
    replica_port, proxy_port = free_port(), free_port()
    proxy_url = f"http://127.0.0.1:{proxy_port}"
    env = {
        **os.environ, "BUCKET_LORA_LOG": "json", "BUCKET_LORA_TRACES": spans.as_uri(),
        "BUCKET_LORA_TOKEN": TOKEN, "BUCKET_LORA_PROXY_TOKEN": TOKEN,
    }  # fmt: skip
    logs = {name: out / f"{name}.log" for name in ("replica", "proxy", "trainer")}

    @contextmanager
    def process(name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        with logs[name].open("wb") as log:
            child = subprocess.Popen([sys.executable, "-m", *command], stderr=log, env=env)
            try:
                yield child
                child.terminate()
                assert child.wait(PATIENCE_S) is not None
            finally:
                child.kill()

    helper = "tests.unit.observability"
    with (
        process("replica", f"{helper}.replica", bucket, str(out / "cache"), str(replica_port)),
        process("proxy", "bucket_lora_proxy", "--port", str(proxy_port),
                "--replica", f"http://127.0.0.1:{replica_port}"),
    ):  # fmt: skip
        _wait_healthy(proxy_url)
        with process("trainer", f"{helper}.trainer", bucket, RUN, proxy_url) as trainer:
            assert trainer.wait(PATIENCE_S) == 0, logs["trainer"].read_text()
        metrics = _get(f"{proxy_url}/metrics")
        command = [sys.executable, "-m", "adapter_bucket.cli", "top", bucket, "--json"]
        top = subprocess.check_output([*command, "--proxy", proxy_url], env=env)
    lines = {name: path.read_text().splitlines() for name, path in logs.items()}
    return Seen(
        logs={name: [json.loads(line) for line in found] for name, found in lines.items()},
        spans=[json.loads(line) for line in spans.read_text().splitlines()],
        metrics=metrics,
        top=json.loads(top),
        everything=spans.read_text() + "".join(path.read_text() for path in logs.values()),
    )


def test_every_line_is_json_and_says_which_part_wrote_it(seen: Seen) -> None:
    for part, lines in seen.logs.items():
        assert lines, part
        assert {line["part"] for line in lines} == {part}
        assert all(line["time"].endswith("Z") and line["message"] for line in lines)


def test_the_run_stands_in_the_log_of_every_part_and_in_the_metrics(seen: Seen) -> None:
    for part, lines in seen.logs.items():
        assert RUN in {line.get("run") for line in lines}, part
    assert f'bucket_lora_proxy_run_latest_version{{run="{RUN}"}} 2.0' in seen.metrics
    ready = [line for line in seen.logs["replica"] if "is ready" in line["message"]]
    assert [(line["version"], line["replica"]) for line in ready] == [(1, "r-1"), (2, "r-1")]


def test_a_line_about_a_version_has_the_id_of_its_trace(seen: Seen) -> None:
    lines = [one for part in ("trainer", "replica") for one in seen.logs[part] if "version" in one]
    assert {line["version"] for line in lines} == {1, 2}
    assert all(line["trace_id"] == trace_id(f"{RUN}-v{line['version']}") for line in lines)


@pytest.mark.parametrize("version", [1, 2])
def test_a_sync_is_one_trace_across_processes(seen: Seen, version: int) -> None:
    name = f"{RUN}-v{version}"
    spans = {
        span["name"]: span
        for span in seen.spans
        if span["context"]["trace_id"] == f"0x{trace_id(name)}"
    }
    assert set(spans) == {"sync", "snapshot", "publish", "fetch", "load", "ready"}
    whole = spans.pop("sync")
    assert whole["parent_id"] is None
    assert whole["context"]["span_id"] == f"0x{root_span_id(name)}"
    for span in spans.values():
        assert span["parent_id"] == whole["context"]["span_id"]
        assert seconds(whole, "start") - CLOCKS_S <= seconds(span, "start") <= seconds(span, "end")
        assert seconds(span, "end") <= seconds(whole, "end") + CLOCKS_S
    assert seconds(spans["publish"], "start") - CLOCKS_S < seconds(spans["fetch"], "start")
    services = {
        name: span["resource"]["attributes"]["service.name"] for name, span in spans.items()
    }
    assert services["publish"] == "bucket-lora-trainer"
    assert services["load"] == services["fetch"] == "bucket-lora-replica"


def seconds(span: dict[str, Any], which: str) -> float:
    return datetime.fromisoformat(span[f"{which}_time"]).timestamp()


def test_top_shows_the_run_and_its_proxy(seen: Seen) -> None:
    assert (seen.top["run"], seen.top["latest"], seen.top["faults"]) == (RUN, 2, [])
    assert (seen.top["proxy"]["up"], seen.top["proxy"]["lag"]) == (1, 0)


def test_no_token_is_in_any_log_or_trace(seen: Seen) -> None:
    assert TOKEN not in seen.everything


def _wait_healthy(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return print(_get(f"{url}/health"))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())

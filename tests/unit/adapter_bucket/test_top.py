from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.cli import main
from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import Heartbeat, Seen, write_heartbeat
from adapter_bucket.manifest import RunState
from adapter_bucket.proxy_metrics import ProxySample, parse_metrics, read_proxy
from adapter_bucket.publish import RunWriter
from adapter_bucket.status import ReplicaStatus, RunStatus
from adapter_bucket.top_frame import proxy_part, replica_part, run_part
from tests.adapters import BASE, version

METRICS = """\
# HELP bucket_lora_proxy_members Replicas
bucket_lora_proxy_members{source="static",state="up"} 2.0
bucket_lora_proxy_members{source="static",state="down"} 1.0
bucket_lora_proxy_requests_total{status="200"} 40.0
bucket_lora_proxy_requests_total{status="503"} 2.0
bucket_lora_proxy_prompt_tokens_total 800.0
bucket_lora_proxy_matched_prompt_tokens_total 700.0
bucket_lora_proxy_in_flight{replica="http://a:1"} 3.0
bucket_lora_proxy_in_flight{replica="http://b:1"} 4.0
bucket_lora_proxy_run_lag_versions{run="run-1"} 2.0
bucket_lora_proxy_run_lag_versions{run="odd \\"name\\""} 9.0
process_open_fds 12.0
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A bucket in a folder: a run with three versions, one a minute, and a replica."""
    found = (tmp_path / "bucket").as_uri()
    store = FileStore.open(found)
    minutes = iter(range(100))
    writer = RunWriter.claim(
        store, "run-1", base_model=BASE, window=4, writer_id="w [bold]\x1b[2J",
        clock=lambda: 1e9 + 60 * next(minutes),
    )  # fmt: skip
    for number in (1, 2, 3):
        writer.publish(number, **version(number))
    beat(store, ready=[1, 2])
    return found


def beat(store: FileStore, *, ready: list[int], refused: dict[int, str] | None = None) -> None:
    run = RunStatus(state="running", latest=3, window=4, ready=ready, refused=refused or {})
    status = ReplicaStatus(
        replica_id="a", base_model="m", dtype="float32", max_loras=8, max_lora_rank=8,
        in_flight=5, runs={"run-1": run},
    )  # fmt: skip
    write_heartbeat(store, Heartbeat(
        run_id="run-1", replica_id="a", url="http://a:1", sequence=len(ready), interval_s=15,
        written_at=0, status=status,
    ))  # fmt: skip


@contextmanager
def metrics_server(answer: Callable[[str | None], tuple[int, str]]) -> Iterator[str]:
    """What a proxy's ``/metrics`` may answer, by the token that came."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer(self.headers["Authorization"])
            self.send_response(code)
            if code == 302:
                self.send_header("Location", body)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def frame(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["top", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (1 if "error" in found else 0)
    return found


def test_a_frame_tells_pace_and_lag(capsys: pytest.CaptureFixture[str], url: str) -> None:
    found = frame(capsys, url, "run-1")
    assert (found["latest"], found["step"], found["kept"]) == (3, 3, [1, 2, 3])
    assert (found["versions_per_min"], found["steps_per_min"]) == (1.0, 1.0)
    (replica,) = found["replicas"]
    assert (replica["ready"], replica["lag"], replica["in_flight"]) == ([1, 2], 1, 5)
    assert replica["alive"]


def test_without_a_run_the_newest_running_one_is_shown(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    store = FileStore.open(url)
    ended = RunWriter.claim(store, "run-2", base_model=BASE, window=2, writer_id="w")
    ended.publish(1, **version(1))  # newer, but its trainer has ended
    ended.close(RunState.FINISHED)
    store.create("runs/broken/manifest.json", b"{")
    assert frame(capsys, url)["run"] == "run-1"


def test_the_text_shows_it_all_and_obeys_no_terminal_codes(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    beat(FileStore.open(url), ready=[1], refused={3: "rank 64 is above 16"})
    with metrics_server(lambda token: (200, METRICS)) as proxy:
        assert main(["top", url, "run-1", "--once", "--proxy", proxy]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "version 3 step 3" in out
    assert "w [bold]�[2J" in out
    assert "v3: rank 64" in out
    assert "2 up, 1 down" in out
    assert "affinity 0.875" in out


def test_a_proxy_that_is_away_is_said_and_hides_nothing(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    found = frame(capsys, url, "run-1", "--proxy", "http://127.0.0.1:9")
    assert found["latest"] == 3
    assert found["proxy"] is None
    assert "127.0.0.1:9/metrics does not answer" in found["faults"][0]


def test_a_run_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert frame(capsys, url, "nothing")["error"] == "NotPublished"


@contextmanager
def top_in_a_terminal(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """``bucket-lora top`` in a real terminal: the end to read from, and the process."""
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "adapter_bucket.cli", "top", *arguments, "--interval", "0.2"]
    child = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "50"},
    )  # fmt: skip
    os.close(terminal)
    try:
        yield main_end, child
    finally:
        child.kill()
        child.wait()
        os.close(main_end)


def test_the_view_is_live_in_a_terminal(url: str) -> None:
    """In a real terminal: a version that is published appears, and Ctrl-C ends it."""
    with top_in_a_terminal(url, "run-1") as (main_end, child):
        _read_until(main_end, r"version 3 ")
        writer = RunWriter.claim(
            FileStore.open(url), "run-1", base_model=BASE, window=4, writer_id="w", takeover=True
        )
        writer.publish(4, **version(4))
        _read_until(main_end, r"version 4 ")
        child.send_signal(signal.SIGINT)
        _read_to_the_end(main_end, child)
        assert child.wait() == 130


def test_in_a_terminal_it_waits_for_a_run_to_begin(tmp_path: Path) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    store = FileStore.open(bucket)
    with top_in_a_terminal(bucket) as (main_end, _):
        _read_until(main_end, r"waiting: no run in")
        RunWriter.claim(store, "run-late", base_model=BASE, window=2, writer_id="w")
        _read_until(main_end, r"run-late  running")


def _read_until(descriptor: int, pattern: str) -> None:
    seen, deadline = "", time.monotonic() + 30
    while not re.search(pattern, seen):
        assert time.monotonic() < deadline, seen
        if select.select([descriptor], [], [], 0.2)[0]:
            seen += os.read(descriptor, 65536).decode(errors="replace")


def _read_to_the_end(descriptor: int, child: subprocess.Popen[bytes]) -> None:
    """As a terminal does: a process whose output nobody takes cannot end."""
    deadline = time.monotonic() + 30
    while child.poll() is None:
        assert time.monotonic() < deadline
        if select.select([descriptor], [], [], 0.05)[0]:
            with suppress(OSError):  # the other side is closed
                os.read(descriptor, 65536)


# --- the proxy's metrics ---


def test_metrics_are_parsed_by_name_and_label() -> None:
    sample = ProxySample(0.0, parse_metrics(METRICS))
    assert sample.total("requests_total") == 42
    assert sample.by("in_flight", "replica") == {"http://a:1": 3, "http://b:1": 4}
    assert parse_metrics("bucket_lora_proxy_x oops\nnonsense\n") == {}


def test_rates_are_between_two_samples_and_none_after_a_restart() -> None:
    first = ProxySample(10.0, parse_metrics("bucket_lora_proxy_requests_total 10"))
    second = ProxySample(12.0, parse_metrics("bucket_lora_proxy_requests_total 50"))
    assert proxy_part(second, first, run_id="r")["requests_per_s"] == 20
    assert proxy_part(first, second, run_id="r")["requests_per_s"] is None
    assert proxy_part(first, None, run_id="r")["requests_per_s"] is None
    assert proxy_part(ProxySample(0, parse_metrics(METRICS)), None, run_id="run-1")["lag"] == 2


def test_the_token_is_sent_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(token: str | None) -> tuple[int, str]:
        return (200, METRICS) if token == "Bearer good-token" else (401, "")

    with metrics_server(answer) as proxy:
        monkeypatch.delenv("BUCKET_LORA_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="answers 401: set BUCKET_LORA_TOKEN"):
            read_proxy(proxy)
        monkeypatch.setenv("BUCKET_LORA_TOKEN", "good-token")
        assert read_proxy(proxy + "/").total("requests_total") == 42


def test_no_redirect_is_followed_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET_LORA_TOKEN", "good-token")
    stolen: list[str | None] = []

    def thief(token: str | None) -> tuple[int, str]:
        stolen.append(token)
        return 200, METRICS

    with (
        metrics_server(thief) as elsewhere,
        metrics_server(lambda token: (302, f"{elsewhere}/metrics")) as proxy,
        pytest.raises(StoreUnavailable, match="answers 302"),
    ):
        read_proxy(proxy)
    assert stolen == []


@pytest.mark.parametrize(
    ("address", "message"),
    [("ftp://x", "is not http"), ("localhost:8000", "is not http"), ("http://", "is not http"),
     ("http://x:secret@host", "holds a login")],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_proxy(address)
    assert "secret" not in str(raised.value)


def test_something_else_than_a_proxy_is_said() -> None:
    with (
        metrics_server(lambda token: (200, "vllm:num_requests_running 1")) as proxy,
        pytest.raises(StoreUnavailable, match="no metrics of a bucket-lora-proxy"),
    ):
        read_proxy(proxy)


# --- parts of a frame ---


def test_a_run_without_a_version_has_no_pace(tmp_path: Path) -> None:
    store = FileStore.open(tmp_path.as_uri())
    writer = RunWriter.claim(store, "run-1", base_model=BASE, window=2, writer_id="w")
    found = run_part(writer.manifest, now=0.0)
    assert (found["step"], found["age_s"], found["versions_per_min"]) == (None, None, None)


def test_a_replica_that_knows_nothing_of_the_run_lags_by_all_of_it(tmp_path: Path) -> None:
    store = FileStore.open(tmp_path.as_uri())
    writer = RunWriter.claim(store, "run-1", base_model=BASE, window=2, writer_id="w")
    writer.publish(1, **version(1))
    status = ReplicaStatus(
        replica_id="a", base_model="m", dtype="float32", max_loras=8, max_lora_rank=8, error="gone"
    )
    heartbeat = Heartbeat(
        run_id="run-1", replica_id="a", url="http://a", sequence=1, interval_s=1, written_at=0,
        status=status,
    )  # fmt: skip
    (found,) = replica_part({"a": Seen(heartbeat, 99.0)}, writer.manifest)
    assert (found["lag"], found["alive"], found["trouble"]) == (1, False, "gone")

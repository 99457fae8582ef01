from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.cli import main
from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import Heartbeat, Seen, write_heartbeat
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.status import ReplicaStatus, RunStatus
from adapter_bucket.top_frame import replica_part, run_part
from tests.adapters import BASE, version
from tests.unit.adapter_bucket.proxy_page import METRICS, metrics_server


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
        _read_while(main_end, lambda _: child.poll() is None)
        assert child.wait() == 130


def test_in_a_terminal_it_waits_for_a_run_to_begin(tmp_path: Path) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    store = FileStore.open(bucket)
    with top_in_a_terminal(bucket) as (main_end, _):
        _read_until(main_end, r"waiting: no run in")
        RunWriter.claim(store, "run-late", base_model=BASE, window=2, writer_id="w")
        _read_until(main_end, r"run-late  running")


def _read_until(descriptor: int, pattern: str) -> None:
    _read_while(descriptor, lambda seen: not re.search(pattern, seen))


def _read_while(descriptor: int, wanted: Callable[[str], bool]) -> None:
    """As a terminal does: a process whose output nobody takes cannot go on, nor end."""
    seen, deadline = "", time.monotonic() + 30
    while wanted(seen):
        assert time.monotonic() < deadline, seen
        if select.select([descriptor], [], [], 0.05)[0]:
            with suppress(OSError):  # the process has ended, which `wanted` has to see
                seen += os.read(descriptor, 65536).decode(errors="replace")


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

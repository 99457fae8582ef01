"""`make demo` as a newcomer runs it: the module the Makefile starts, watched from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.observe import read_metrics
from demo.summary import summarise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start_demo(out: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--out", str(out), *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_naming(path: Path) -> list[str]:
    """Command lines of live processes that mention ``path``, this one's apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # ended meanwhile
                continue
            if str(path) in command:
                found.append(command.replace("\0", " "))
    return found


def test_the_demo_learns_and_writes_its_report(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "out", "--steps", "40")
    output, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, output[-3000:]
    for phrase in ("reward, first", "ratio", "snapshot", "publish", "ready", "stale", "replica-2"):
        assert phrase in output, phrase
    report = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in report
    assert "Sync timeline" in report
    summary = summarise(read_metrics(tmp_path / "out" / "trainer" / "metrics.jsonl"))
    # The loop's own tests hold a longer run to a threefold gain.
    assert summary.reward_last >= 1.2 * summary.reward_first
    assert processes_naming(tmp_path) == []


def test_ctrl_c_stops_every_process_it_started(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = start_demo(out)
    deadline = time.monotonic() + 120
    while not (out / "logs" / "replica-2.log").exists():
        assert time.monotonic() < deadline
        assert demo.poll() is None
        time.sleep(0.2)
    time.sleep(3)  # into vLLM's start, when it has spawned its engine or is about to
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output[-2000:]
    assert "every process was stopped" in output
    assert processes_naming(out) == []

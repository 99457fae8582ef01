"""SIGTERM in real processes: when it interrupts, when it waits, and that the deadline is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trl_async_bucket.preemption import EXIT_CODE, SAME_NOTICE_S, Preempted, SigtermWatch

ROOT = Path(__file__).parents[3]

HEAD = """
import logging, queue, signal, sys, threading, time
from trl_async_bucket.preemption import Preempted, SigtermWatch

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

def say(text):
    print(text, flush=True)

def watch(grace_s, last_call=lambda left: say(f"last call {left:.1f}")):
    made = SigtermWatch(grace_s, on_last_call=last_call)
    say(f"installed {made.install()}")
    return made
"""


class Child:
    """A script that says where it is."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", HEAD + script],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = time.monotonic()

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"the script ended before it said {text!r}")

    def term(self) -> None:
        self.started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str, float]:
        """(exit code, what it said, seconds since the last ``term``)."""
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            rest = stdout.read()
        code = self.process.wait(30)
        return code, rest, time.monotonic() - self.started


def test_a_notice_ends_a_wait_at_once() -> None:
    child = Child("""
w = watch(20)
try:
    with w.interruptible():
        say("waiting")
        queue.Queue().get(timeout=15)
except Preempted:
    say("published")
    w.settled()
    w.uninstall()
    raise
""")
    child.until("waiting")
    child.term()
    code, said, seconds = child.end()
    assert code == EXIT_CODE == 143
    assert "published" in said
    assert "last call" not in said
    assert seconds < 5


def test_a_notice_waits_for_the_boundary_and_never_cuts_a_step() -> None:
    child = Child("""
w = watch(20)
with w.interruptible(False):
    say("step")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    say("step done")
say(f"noticed {w.noticed}")
try:
    with w.interruptible():
        say("never here")
except Preempted:
    say("stopped")
    w.settled()
    w.uninstall()
    raise
""")
    child.until("step")
    child.term()
    code, said, _ = child.end()
    assert code == 143
    assert "step done\nnoticed True\nstopped" in said.replace("SIGTERM: training", "\nSIGTERM")
    assert "never here" not in said


def test_the_deadline_is_kept_while_the_main_thread_is_stuck_outside_of_python() -> None:
    """As in a collective that waits for a dead rank: no Python handler ever runs."""
    child = Child("""
import hashlib
w = watch(2)
say("stuck")
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000_000)
say("never here")
""")
    child.until("stuck")
    time.sleep(0.2)
    child.term()
    code, said, seconds = child.end()
    assert code == 143
    assert "last call" in said
    assert "never here" not in said
    assert 1.5 < seconds < 6


def test_the_deadline_is_kept_where_nobody_reads_the_log_any_more() -> None:
    """The main thread hangs in a write and holds the locks of logging."""
    child = Child("""
w = watch(2)
say("writing")
while True:
    logging.warning("a line that nobody reads, %s", 1000 * "x")
""")
    child.until("writing")
    time.sleep(0.5)
    child.term()
    assert child.process.wait(10) == 143
    assert time.monotonic() - child.started < 6
    child.end()


def test_one_notice_from_all_sides_has_one_deadline() -> None:
    """The handler, the listener, and another rank by way of the trainer."""
    calls: list[float] = []
    ended = threading.Event()
    watch = SigtermWatch(1.0, on_last_call=calls.append, end=lambda code: ended.set())
    together, before = threading.Barrier(8), set(threading.enumerate())

    def notice() -> None:
        together.wait()
        watch.notice()

    threads = [threading.Thread(target=notice) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    new = set(threading.enumerate()) - before
    assert len([thread for thread in new if thread.name == "bucket-deadline"]) == 1
    assert ended.wait(5)
    assert len(calls) == 1


def test_a_last_call_that_hangs_does_not_hold_the_process() -> None:
    child = Child("""
w = watch(1.5, lambda left: time.sleep(60))
say("working")
time.sleep(60)
""")
    child.until("working")
    child.term()
    code, _, seconds = child.end()
    assert code == 143
    assert seconds < 6


def test_the_same_notice_twice_is_one_and_a_later_one_ends_the_process() -> None:
    child = Child("""
w = watch(40)
say("working")
while True:
    time.sleep(0.05)
""")
    child.until("working")
    child.term()
    child.until("SIGTERM: training stops")
    child.term()
    time.sleep(SAME_NOTICE_S + 0.5)
    assert child.process.poll() is None
    child.term()
    code, said, seconds = child.end()
    assert code == 143
    assert "a second SIGTERM" in said
    assert seconds < 5


def test_the_former_handler_comes_back_and_is_told() -> None:
    child = Child("""
signal.signal(signal.SIGTERM, lambda number, frame: say(f"former {number}"))
w = watch(20)
try:
    with w.interruptible():
        say("waiting")
        time.sleep(15)
except Preempted:
    say("stopped")
    w.settled()
    w.uninstall()
signal.raise_signal(signal.SIGTERM)
""")
    child.until("waiting")
    child.term()
    code, said, _ = child.end()
    assert code == 0  # the script caught Preempted
    assert said.index("stopped") < said.index("former 15")
    assert said.count("former 15") == 2


def test_after_a_notice_the_rest_of_the_script_has_the_same_deadline() -> None:
    child = Child("""
w = watch(2)
try:
    with w.interruptible():
        say("waiting")
        time.sleep(15)
except Preempted:
    w.settled()
    w.uninstall()
say("saving something slowly")
time.sleep(60)
""")
    child.until("waiting")
    child.term()
    code, said, seconds = child.end()
    assert code == 143
    assert "last call" not in said
    assert 1.5 < seconds < 6


def test_an_ignored_signal_stays_ignored() -> None:
    child = Child("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
w = watch(1)
signal.raise_signal(signal.SIGTERM)
time.sleep(1.5)
w.uninstall()
say("alive")
""")
    code, said, _ = child.end()
    assert code == 0
    assert "installed False" in said
    assert "alive" in said


def test_another_thread_cannot_watch() -> None:
    found: list[bool] = []
    watch = SigtermWatch(1, on_last_call=lambda left: None)
    thread = threading.Thread(target=lambda: found.append(watch.install()))
    thread.start()
    thread.join()
    watch.uninstall()
    assert found == [False]


def test_a_notice_from_another_rank_counts() -> None:
    ended = threading.Event()
    watch = SigtermWatch(2.0, on_last_call=lambda left: None, end=lambda code: ended.set())
    assert watch.left_s == 0
    watch.notice()
    assert 0 < watch.left_s <= 1.9
    with pytest.raises(Preempted), watch.interruptible():
        raise AssertionError("not reached")
    with watch.interruptible():  # the same notice does not cut what is done about it
        pass
    assert ended.wait(5)


def test_python_tells_an_event_loop_of_signals_as_before() -> None:
    """Somebody else's wakeup descriptor is left alone."""
    child = Child("""
import socket
ours, theirs = socket.socketpair()
ours.setblocking(False)
signal.set_wakeup_fd(ours.fileno())
w = watch(20)
try:
    with w.interruptible():
        say("waiting")
        time.sleep(15)
except Preempted:
    w.settled()
    w.uninstall()
say(f"told {theirs.recv(8)[0]}, {signal.set_wakeup_fd(-1) == ours.fileno()}")
""")
    child.until("waiting")
    child.term()
    code, said, _ = child.end()
    assert code == 0
    assert "told 15, True" in said


def test_a_forked_worker_dies_of_its_own_and_says_nothing_to_the_trainer() -> None:
    """A data loader ends its workers by SIGTERM."""
    child = Child("""
import os
w = watch(20)
worker = os.fork()
if worker == 0:
    time.sleep(30)
    os._exit(0)
time.sleep(0.3)
os.kill(worker, signal.SIGTERM)
status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
time.sleep(0.3)
say(f"worker {status}, noticed {w.noticed}")
w.uninstall()
""")
    code, said, _ = child.end()
    assert code == 0
    assert "worker -15, noticed False" in said

"""A real asynchronous trainer loses its machine, and goes on against the same replicas."""

from __future__ import annotations

import shutil
import signal
import statistics
import time

import pytest

from adapter_bucket.fetch import RunReader
from adapter_bucket.manifest import Manifest, RunState
from demo.summary import series, steps_only
from tests.integration.loop.conftest import RUN_ID, Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_preempted_trainer_goes_on_with_step_and_version_numbers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fleet.store(monkeypatch)

    def manifest() -> Manifest:
        found = RunReader(store, RUN_ID).poll()
        assert found is not None
        return found

    with fleet.trainer("preempted", "--save-steps", "1000", steps=100_000) as first:
        fleet.processes.wait_until(
            "the trainer to take 5 steps",
            lambda: len(steps_only(fleet.metrics("preempted"))) >= 5,
            timeout_s=150,
            watch=[first],
        )
        noticed = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(40) == 143, first.log_path.read_text(errors="replace")[-3000:]
        assert time.monotonic() - noticed < 27
    before = manifest()
    assert before.state is RunState.INTERRUPTED
    (checkpoint,) = before.checkpoints
    assert checkpoint.step >= 5
    assert before.versions[-1].step == checkpoint.step
    shutil.rmtree(fleet.out / "preempted")  # the machine is gone

    steps = checkpoint.step + 6
    options = ("--resume", "bucket", "--save-steps", "1000")
    with fleet.trainer("elsewhere", *options, steps=steps) as second:
        fleet.wait_trained(second, timeout_s=180)
    rows = steps_only(fleet.metrics("elsewhere"))
    assert [row["step"] for row in rows] == list(range(checkpoint.step + 1, steps + 1))
    # The first version of the new trainer is that of its start; the first step's is the next.
    assert series(rows, "bucket/version")[0] == before.latest + 2
    after = manifest()
    assert after.state is RunState.FINISHED
    assert after.writer.epoch == before.writer.epoch + 1
    assert after.latest == before.latest + 7
    assert [entry.step for entry in after.checkpoints] == [checkpoint.step, steps]
    # On-policy within the bound of a run that never stopped: the policy was not lost.
    assert abs(statistics.fmean(series(rows, "ratio")) - 1) <= 0.02
    log = second.log_path.read_text(errors="replace")
    assert f"goes on from checkpoint {checkpoint.step}" in log

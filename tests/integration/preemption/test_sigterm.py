"""SIGTERM to a real trainer: what is in the bucket afterwards, and how the next one goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from adapter_bucket.manifest import RunState
from demo.processes import free_port
from tests.integration.preemption.conftest import Bench, Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_preempted_run_goes_on_elsewhere_and_ends_the_same(bench: Bench, tmp_path: Path) -> None:
    first = bench.start("first", "--save-steps", "1000", "--step-s", "0.1")
    first.until("step", 5)
    first.term()
    code, seconds = first.end()
    assert code == 143, first.tail()
    assert seconds < 15
    last = first.of("step")[-1]
    manifest = bench.manifest()
    assert manifest.state is RunState.INTERRUPTED
    # Everything up to the last step is there, without a save_steps having come by.
    assert manifest.latest == last["version"]
    assert manifest.versions[-1].step == last["step"]
    assert [entry.step for entry in manifest.checkpoints] == [last["step"]]
    assert "Traceback" not in first.log.read_text()

    second = bench.start("second", "--alone", (tmp_path / "alone").as_uri())
    began = second.until("began")
    assert began["began"] == last["step"]
    assert began["version"] == last["version"] + 1
    assert began["epoch"] == 2
    assert second.end()[0] == 0, second.tail()
    assert second.of("step")[0]["step"] == last["step"] + 1
    assert second.of("finished")[0]["finished"] == second.of("undisturbed")[0]["undisturbed"]
    assert bench.manifest().state is RunState.FINISHED


def test_a_wait_for_data_is_cut_short(bench: Bench) -> None:
    trainer = bench.start("waits", "--row-s", "60", "--steps", "3")
    trainer.until("waiting")
    trainer.term()
    code, seconds = trainer.end()
    assert code == 143, trainer.tail()
    assert seconds < 15
    manifest = bench.manifest()
    assert manifest.state is RunState.INTERRUPTED
    assert manifest.latest == 1  # the version of the start
    assert manifest.checkpoints == []  # nothing was trained that could be lost


def test_a_bucket_too_slow_for_a_checkpoint_costs_the_checkpoint_only(bench: Bench) -> None:
    trainer = bench.start("slow", "--put-s", "30", "--grace-s", "8", "--step-s", "0.1")
    trainer.until("step", 3)
    trainer.term()
    code, seconds = trainer.end()
    assert code == 143, trainer.tail()
    assert seconds < 10
    manifest = bench.manifest()
    assert manifest.state is RunState.INTERRUPTED
    assert manifest.latest == trainer.of("step")[-1]["version"]
    assert manifest.checkpoints == []


def test_a_step_longer_than_the_grace_time_is_left_behind(bench: Bench) -> None:
    trainer = bench.start("long", "--grace-s", "8", "--step-s", "60")
    trainer.until("began")
    time.sleep(0.5)
    trainer.term()
    code, seconds = trainer.end()
    assert code == 143, trainer.tail()
    assert 6 < seconds < 12
    assert bench.manifest().state is RunState.INTERRUPTED
    assert "no step boundary came in time" in trainer.tail()


def test_ranks_stop_at_the_same_step_though_one_got_the_notice_and_go_on_together(
    bench: Bench,
) -> None:
    """Two processes with gloo; the notice goes to rank 1, the bucket is rank 0's."""
    ranks = start_ranks(bench, "both", "--save-steps", "1000", "--step-s", "0.1")
    ranks[0].until("step", 4)
    ranks[1].term()
    assert [rank.end()[0] for rank in ranks] == [143, 143], ranks[0].tail() + ranks[1].tail()
    (last,) = {rank.of("step")[-1]["step"] for rank in ranks}
    manifest = bench.manifest()
    assert manifest.state is RunState.INTERRUPTED
    assert [entry.step for entry in manifest.checkpoints] == [last]

    again = start_ranks(bench, "again", "--save-steps", "1000", "--steps", str(last + 3))
    assert [rank.end()[0] for rank in again] == [0, 0], again[0].tail() + again[1].tail()
    assert again[0].of("began")[0] == {"began": last, "version": manifest.latest + 1, "epoch": 2}
    for rank in again:  # DDP: the same batches, optimizer state and policy on both
        assert [event["step"] for event in rank.of("step")] == [last + 1, last + 2, last + 3]
        assert rank.of("finished") == again[0].of("finished")
    assert bench.manifest().state is RunState.FINISHED


def start_ranks(bench: Bench, name: str, *arguments: str) -> list[Trainer]:
    port = str(free_port())
    started = []
    for rank in range(2):
        env = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        started.append(bench.start(name, *arguments, env=env))
        if rank == 0:
            started[0].log.rename(started[0].log.with_suffix(".rank0.log"))
            started[0].log = Path(started[0].log.with_suffix(".rank0.log"))
    return started

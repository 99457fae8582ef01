"""The launcher with the Hub's real client, against a local stand-in of the Hub."""

from __future__ import annotations

import base64
import json
import shlex
import signal
import zlib

import pytest

from tests.deploy.hf_jobs.conftest import S3_SECRET, Launcher
from tests.deploy.hf_jobs.fake_hub import TOKEN, FakeHub


def test_a_run_is_started_watched_and_taken_down(launcher: Launcher, hub: FakeHub) -> None:
    hub.fate = {"trainer": "COMPLETED"}
    ended = launcher.run()
    assert ended.code == 0, ended.output
    assert [job.name for job in hub.jobs] == [
        "math-1-replica-1", "math-1-replica-2", "math-1-trainer",
    ]  # fmt: skip
    assert [job.stage for job in hub.jobs] == ["CANCELED", "CANCELED", "COMPLETED"]
    assert hub.buckets == {"me/rl": {"private": True}}
    assert "cost: $3.60 an hour (2 × t4-small at $0.60 + 1 × a100-large at $2.40)" in ended.output
    assert "math-1-replica-1 | hello from the job" in ended.output
    assert "math-1-trainer | hello from the job" in ended.output


def test_the_trainer_gets_the_replicas_addresses_and_the_script(
    launcher: Launcher, hub: FakeHub
) -> None:
    hub.fate = {"trainer": "COMPLETED"}
    launcher.run()
    trainer = hub.job("trainer")
    words = shlex.split(trainer.shell)
    given = [words[place + 1] for place, word in enumerate(words) if word == "--replica"]
    assert given == [f"{hub.url}/exposed/job1", f"{hub.url}/exposed/job2"]
    packed = base64.b64decode(trainer.env["BUCKET_LORA_SCRIPT"])
    assert zlib.decompress(packed) == b"print('training')\n"
    assert trainer.shell.count(" && exec ") == 1, "signals must reach the proxy's parent"


def test_secrets_travel_as_secrets_only(launcher: Launcher, hub: FakeHub) -> None:
    hub.fate = {"trainer": "COMPLETED"}
    hub.log_lines = (f"the job prints {S3_SECRET} and {TOKEN}",)
    ended = launcher.run()
    for job in hub.jobs:
        assert job.secrets == {"HF_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": S3_SECRET}
        seen = json.dumps({**job.spec, "secrets": None})
        assert TOKEN not in seen
        assert S3_SECRET not in seen
    assert "the job prints *** and ***" in ended.output
    assert TOKEN not in ended.output
    assert S3_SECRET not in ended.output


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ({"refuse_start": "replica-2"}, "math-1-replica-2 could not be started"),
        ({"refuse_start": "trainer"}, "math-1-trainer could not be started"),
        ({"lose_answer": "replica-2"}, "math-1-replica-2 could not be started"),
        ({"fate": {"replica-1": "ERROR"}, "looks_before_end": 2}, "ended as ERROR (as the test"),
        ({"fate": {"trainer": "ERROR"}}, "math-1-trainer ended as ERROR"),
        ({"fate": {"replica-1": "ERROR", "replica-2": "ERROR"}}, "no replica is left"),
    ],
    ids=["replica", "trainer", "lost answer", "replica ends", "trainer ends", "no replica left"],
)
def test_a_failed_launch_leaves_no_job_running(
    launcher: Launcher, hub: FakeHub, fault: dict[str, object], word: str
) -> None:
    for name, value in fault.items():
        setattr(hub, name, value)
    ended = launcher.run()
    assert ended.code == 1
    assert word in ended.output
    assert hub.jobs
    assert hub.running() == []


def test_replicas_that_never_answer_end_the_launch(launcher: Launcher, hub: FakeHub) -> None:
    hub.unhealthy = True
    launcher.run_file.write_text(f"ready_timeout_s: 0.5\n{launcher.run_file.read_text()}")
    ended = launcher.run()
    assert ended.code == 1
    assert "0 of 2 replicas were healthy within 0.5 s (ready_timeout_s)" in ended.output
    assert len(hub.jobs) == 2, "no trainer is paid for"
    assert hub.running() == []


@pytest.mark.parametrize(
    ("jobs", "number"),
    [(1, signal.SIGINT), (2, signal.SIGINT), (3, signal.SIGINT), (3, signal.SIGTERM)],
    ids=["starting", "waiting", "training", "training, SIGTERM"],
)
def test_a_signal_at_any_stage_cancels_everything(
    launcher: Launcher, hub: FakeHub, jobs: int, number: int
) -> None:
    hub.unhealthy = jobs == 2
    ended = launcher.run_until(lambda: len(hub.jobs) >= jobs, number)
    assert ended.code == 128 + number, ended.output
    assert hub.running() == []


def test_cancelling_is_repeated_and_a_job_that_is_left_is_named(
    launcher: Launcher, hub: FakeHub
) -> None:
    hub.fate = {"trainer": "COMPLETED"}
    hub.cancel_faults = 3
    ended = launcher.run()
    assert ended.code == 0
    assert hub.running() == []

    hub.jobs.clear()
    hub.cancel_faults = 1000
    ended = launcher.run()
    assert ended.code == 1
    assert "job job1 MAY STILL RUN AND COST MONEY: hf jobs cancel job1" in ended.output


def test_a_hub_that_fails_for_a_moment_ends_nothing(launcher: Launcher, hub: FakeHub) -> None:
    hub.fate = {"trainer": "COMPLETED"}
    hub.state_faults = 5
    assert launcher.run().code == 0

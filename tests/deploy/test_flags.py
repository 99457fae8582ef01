"""Every flag and variable in a launcher, or in its README, exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.deploy.commands import DEPLOY, ROOT, commands, fault, launchers
from trl_async_bucket.launch.job_plan import replica_jobs, trainer_job
from trl_async_bucket.launch.run_config import load
from vllm_bucket_lora.config import OPTIONS

SOURCES = ("adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "proxy")


@pytest.mark.parametrize(
    "path", [p for p in launchers() if commands(p)], ids=lambda path: str(path.relative_to(DEPLOY))
)
def test_every_command_is_understood(path: Path) -> None:
    faults = [(fault(argv), shlex.join(argv)) for argv in commands(path)]
    assert not [pair for pair in faults if pair[0]]


def test_the_commands_of_all_platforms_are_found() -> None:
    programs = {
        path.relative_to(DEPLOY).as_posix(): {
            argv[1] if argv[0] == "-m" else argv[0] for argv in found
        }
        for path in launchers()
        if (found := commands(path))
    }
    for replicas in (
        "compose/compose.yaml", "kubernetes/replicas.yaml", "skypilot/replicas.yaml",
        "slurm/replicas.sbatch", "systemd/bucket-lora-replica@.service",
    ):  # fmt: skip
        assert "vllm" in programs[replicas]
    for trainer in (
        "compose/compose.yaml", "kubernetes/trainer.yaml", "skypilot/trainer.yaml",
        "slurm/trainer.sbatch", "systemd/bucket-lora-trainer.service",
    ):  # fmt: skip
        assert "trl_async_bucket" in programs[trainer]


def test_the_jobs_of_hugging_face_are_understood() -> None:
    config = load(DEPLOY / "hf-jobs" / "run.yaml")
    jobs = [*replica_jobs(config), trainer_job(config, ["https://job--8000.hf.jobs"])]
    for job in jobs:
        argv = shlex.split(job.command[-1].partition(" && exec ")[2])
        if argv[0] != "vllm":
            argv = argv[1:]
            assert fault(argv[argv.index("--") + 2 :]) is None
        assert fault(argv) is None


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (
            ["vllm", "serve", "m", "--plugin", "bucket-lora", "--bucket-lora-ulr", "x"],
            "no --bucket",
        ),
        (["vllm", "serve", "m", "--enable-lora"], "--plugin bucket-lora is missing"),
        (["vllm", "serve", "m", "--plugin=bucket-lora", "--max-lorass=7"], "no --max-lorass"),
        (["bucket-lora-proxy", "--replicas", "x"], "unrecognized arguments"),
        (["-m", "trl_async_bucket", "run", "--bucket-uri", "x", "t.py"], "unrecognized"),
        (["-m", "trl_async_bucket.launch", "with-proxy", "--replika", "x", "--", "y"], "unrecog"),
    ],
)
def test_a_wrong_flag_would_be_seen(argv: list[str], word: str) -> None:
    assert word in str(fault(argv))


def test_every_variable_of_ours_is_read_by_the_code() -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
    )
    known = {option.env for option in OPTIONS} | set(re.findall(r'"(BUCKET_LORA_[A-Z_]+)"', code))
    for path in launchers():
        used = set(re.findall(r"\bBUCKET_LORA_[A-Z_]+\b", path.read_text(encoding="utf-8")))
        assert used <= known, path

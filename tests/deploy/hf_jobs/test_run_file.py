"""The description of a run: what is refused, and what a dry run shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from trl_async_bucket.launch.job_plan import (
    MAX_SCRIPT_CHARS,
    bucket_url,
    check_no_secret,
    hf_bucket,
    replica_jobs,
    trainer_job,
)
from trl_async_bucket.launch.run_config import load

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("name: math-1", "name: 'math 1'", "name: run id 'math 1'"),
        ("bucket: hf://buckets/me/rl/team", "bucket: file:///rl", "jobs share no folder"),
        ("bucket: hf://buckets/me/rl/team", "bucket: hf://me/rl", "must be hf://buckets/"),
        ("count: 2", "count: 0", "replicas.count=0 must be 1 to 64"),
        ("count: 2", "count: two", "replicas.count='two' must be of type int"),
        ("count: 2", "counts: 2", "replicas.counts is unknown; use args, count"),
        ("  flavor: t4-small\n", "", "replicas.flavor is missing"),
        ("script: train.py", "script: gone.py", "gone.py is no file"),
        ("secrets: [AWS_SECRET_ACCESS_KEY]", "secrets: [hf_abc=1]", "names, never values"),
        ("env: {WANDB_MODE: offline}", "timeout: soon", "timeout='soon' must be a time"),
        ("env: {WANDB_MODE: offline}", "min_replicas: 3", "min_replicas=3 must be 0 to 2"),
        ("env: {WANDB_MODE: offline}", "env: [A]", "env must be a mapping"),
        ("name: math-1", "name: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused(run_file: Path, old: str, new: str, word: str) -> None:
    text = run_file.read_text()
    assert old in text
    run_file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        hf_bucket(load(run_file))
    assert word in str(caught.value)


def test_a_secret_outside_of_secrets_is_refused_without_being_shown(run_file: Path) -> None:
    secret = "do-not-show-me"
    config = load(run_file)
    jobs = replica_jobs(config)
    check_no_secret(config, jobs, {"KEY": secret})
    for place, text in (
        ("env.WANDB_MODE", run_file.read_text().replace("offline", secret)),
        ("command of math-1-replica-1", run_file.read_text().replace("--max-loras", secret)),
    ):
        run_file.write_text(text)
        config = load(run_file)
        with pytest.raises(ConfigError) as caught:
            check_no_secret(config, replica_jobs(config), {"KEY": secret})
        assert place in str(caught.value)
        assert secret not in str(caught.value)
        run_file.write_text(text.replace(secret, "other"))
    config.trainer.script.write_text(f"key = '{secret}'")
    with pytest.raises(ConfigError, match=r"stands in train\.py"):
        check_no_secret(config, [], {"KEY": secret})


def test_a_script_that_is_too_large_is_refused(run_file: Path) -> None:
    config = load(run_file)
    config.trainer.script.write_bytes(os.urandom(MAX_SCRIPT_CHARS))
    with pytest.raises(ConfigError, match="put its modules into a package"):
        trainer_job(config, [])


def test_a_mounted_bucket_needs_no_keys(run_file: Path) -> None:
    run_file.write_text(f"mount_bucket: true\n{run_file.read_text()}")
    config = load(run_file)
    assert bucket_url(config) == "file:///bucket"
    for job in (*replica_jobs(config), trainer_job(config, [])):
        assert job.mount is not None
        assert (job.mount.source, job.mount.path) == ("me/rl", "team")
        assert "file:///bucket" in job.command[-1]


def test_the_example_is_a_good_file() -> None:
    config = load(ROOT / "deploy" / "hf-jobs" / "run.yaml")
    jobs = [*replica_jobs(config), trainer_job(config, [])]
    assert [job.name for job in jobs][-2:] == ["gsm8k-1-replica-4", "gsm8k-1-trainer"]


def test_a_dry_run_shows_all_jobs_without_network_and_starts_none(
    run_file: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trl_async_bucket.launch", "hf-jobs", "--config", run_file,
         "--dry-run"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path),
             "HF_TOKEN": "hf_of_nobody"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("math-1-replica-1", "math-1-replica-2", "math-1-trainer"):
        assert f"{name}  (" in done.stdout
    assert "--plugin bucket-lora --bucket-lora-url hf://buckets/me/rl/team" in done.stdout
    assert "cost: 2 × t4-small + 1 × a100-large; prices are unknown" in done.stdout
    assert "hf_of_nobody" not in done.stdout + done.stderr

"""Unchanged scripts, run as a user runs them: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import pickle, sys
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
args = ["--output_dir", "out", "--use_cpu", "--bf16", "false", "--report_to", "none"]
def reward(completions, **_): return [0.0 for _ in completions]
for config in (GRPOConfig, AsyncGRPOConfig):
    (one,) = TrlParser([config]).parse_args_and_config([*args, *sys.argv[1:]])
    again = pickle.loads(pickle.dumps(one))
    print(config.__name__, one.weight_sync, one.bucket_url, again.bucket_url == one.bucket_url)
print(GRPOTrainer.__module__, AsyncGRPOTrainer.__module__, __name__, sys.argv[1:])
print(pickle.loads(pickle.dumps(reward)) is reward)
"""

SAY_BY_RANK = """
import os, sys
sys.stdout = open("said-" + os.environ["RANK"], "w")
"""


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=tmp_path, capture_output=True, text=True,
        timeout=150, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_script_gets_the_bucket_without_a_changed_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(
        tmp_path, "-m", "trl_async_bucket", "run", "--bucket-url", "file:///b", "train.py",
        "--bucket_run_id", "r1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "GRPOConfig bucket file:///b True",
        "AsyncGRPOConfig bucket file:///b True",
        "trl_async_bucket.grpo trl_async_bucket.async_grpo __main__ ['--bucket_run_id', 'r1']",
        "True",
    ]


def test_with_auto_a_script_that_does_not_ask_for_the_bucket_trains_as_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import trl_async_bucket.auto\n" + SCRIPT)
    done = run(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        "GRPOConfig trl None True",
        "AsyncGRPOConfig trl None True",
    ]


def test_an_import_that_comes_too_early_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from trl import GRPOTrainer\nimport trl_async_bucket.auto")
    done = run(tmp_path, "train.py")
    assert done.returncode != 0
    assert "GRPOTrainer was imported from TRL before" in done.stderr


def test_a_yaml_config_may_name_the_fields_on_every_rank_of_accelerates_launcher(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.yaml").write_text("bucket_url: s3://b/p\nbucket_ready: quorum:2\n")
    (tmp_path / "train.py").write_text(SAY_BY_RANK + SCRIPT)
    done = run(
        tmp_path, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--main_process_port", "0", "-m", "trl_async_bucket", "run", "--weight-sync", "bucket",
        "train.py", "--config", "run.yaml",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        said = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert said[:2] == [
            "GRPOConfig bucket s3://b/p True",
            "AsyncGRPOConfig bucket s3://b/p True",
        ]
        assert said[2].startswith("trl_async_bucket.grpo trl_async_bucket.async_grpo __main__")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "missing.py"], "missing.py is no file"),
        (["run", "--bucket-dtype", "int8", "x.py"], "int8"),
        (["walk"], "invalid choice"),
    ],
)
def test_a_wrong_command_line_is_named(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run(tmp_path, "-m", "trl_async_bucket", *arguments)
    assert done.returncode != 0
    assert words in done.stderr

"""The batch scripts: ShellCheck, and what they would run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bucket_lora_proxy.membership.rule import AllowRule
from tests.deploy.commands import fault

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
SCRIPTS = [*sorted((FOLDER / "slurm").glob("*.sbatch")), FOLDER / "skypilot" / "certificate.sh"]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run(
        [SHELLCHECK, "--severity=style", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def run(
    script: str, folder: Path, *arguments: str, domain: str = "cluster.example", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with a stand-in for ``srun`` that prints its arguments, one a line.

    Slurm itself is a cluster of daemons; the scripts are run as it would run them.
    """
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    hostname = folder / "hostname"
    hostname.write_text(f'#!/bin/sh\ncase $1 in -d) echo "{domain}";; *) echo node7;; esac\n')
    hostname.chmod(0o755)
    return subprocess.run(
        ["bash", FOLDER / "slurm" / script, *arguments],
        capture_output=True, text=True, check=False,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **env},
    )  # fmt: skip


def test_a_replica_of_an_array_has_a_port_of_its_own(tmp_path: Path) -> None:
    done = run(
        "replicas.sbatch", tmp_path,
        SLURM_ARRAY_TASK_ID="3", BUCKET_LORA_URL="s3://b/rl", VLLM_API_KEY="secret",
    )  # fmt: skip
    argv = done.stdout.splitlines()
    assert argv[:3] == ["--ntasks=1", "vllm", "serve"], done.stderr
    assert argv[argv.index("--port") + 1] == "8103"
    assert argv[argv.index("--bucket-lora-public-url") + 1].endswith(":8103")
    assert fault(argv[1:]) is None
    assert "secret" not in done.stdout


def test_the_trainer_runs_the_script_beside_a_proxy(tmp_path: Path) -> None:
    done = run(
        "trainer.sbatch", tmp_path, "my train.py", "--learning_rate", "1e-5",
        BUCKET_LORA_URL="s3://b/rl", RUN_ID="math-1", VLLM_API_KEY="secret",
    )  # fmt: skip
    argv = done.stdout.splitlines()
    assert argv[-3:] == ["my train.py", "--learning_rate", "1e-5"], done.stderr
    assert fault(argv[2:]) is None
    assert fault(argv[argv.index("--") + 2 :]) is None
    assert "secret" not in done.stdout


@pytest.mark.parametrize(
    ("domain", "given", "allowed"),
    [
        ("cluster.example", {}, "http://*.cluster.example:*"),
        ("cluster.example", {"ALLOW_REPLICA": "http://gpu*:*"}, "http://gpu*:*"),
        ("", {"ALLOW_REPLICA": "http://node*:*"}, "http://node*:*"),
        ("", {}, None),
    ],
)
def test_only_nodes_of_the_cluster_are_replicas(
    tmp_path: Path, domain: str, given: dict[str, str], allowed: str | None
) -> None:
    env = {"BUCKET_LORA_URL": "s3://b/rl", "RUN_ID": "r", "VLLM_API_KEY": "secret", **given}
    done = run("trainer.sbatch", tmp_path, "t.py", domain=domain, **env)
    if allowed is None:
        assert done.returncode != 0
        assert "ALLOW_REPLICA: nodes here have no DNS domain" in done.stderr
        return
    argv = done.stdout.splitlines()
    pattern = argv[argv.index("--allow-replica") + 1]
    assert pattern == allowed
    AllowRule.parse(pattern)  # the proxy would take it


@pytest.mark.parametrize(
    ("script", "given"), [("replicas.sbatch", ()), ("trainer.sbatch", ("t.py",))]
)
def test_a_dry_run_prints_what_srun_would_get(
    tmp_path: Path, script: str, given: tuple[str, ...]
) -> None:
    env = {"BUCKET_LORA_URL": "s3://b/rl", "RUN_ID": "r", "VLLM_API_KEY": "secret"}
    real = run(script, tmp_path, *given, **env)
    dry = run(script, tmp_path, *given, DRY_RUN="1", **env)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines() == real.stdout.splitlines()[1:]  # without srun's own --ntasks


@pytest.mark.parametrize(
    ("script", "missing"),
    [("replicas.sbatch", "BUCKET_LORA_URL"), ("replicas.sbatch", "VLLM_API_KEY"),
     ("trainer.sbatch", "RUN_ID"), ("trainer.sbatch", "BUCKET_LORA_URL")],
)  # fmt: skip
def test_a_missing_variable_stops_the_script(tmp_path: Path, script: str, missing: str) -> None:
    env = {"BUCKET_LORA_URL": "s3://b/rl", "VLLM_API_KEY": "k", "RUN_ID": "r"}
    del env[missing]
    done = run(script, tmp_path, "train.py", SLURM_ARRAY_TASK_ID="0", **env)
    assert done.returncode != 0
    assert missing in done.stderr
    assert not done.stdout

"""Every example, in its ``--tiny`` mode, as a person starts it. Real TRL, vLLM and proxy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter_bucket.fetch import RunReader
from adapter_bucket.stores import open_store
from demo.tiny_model import build
from examples.gsm8k_math import MODEL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CPU = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # see demo.fleet
}


def run(*arguments: str | Path, **env: str) -> str:
    """Run Python in the repository's root; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env={**os.environ, **CPU, **env}, text=True, check=False, timeout=390,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_two_runs_share_a_fleet_and_both_learn_from_it() -> None:
    """Runs ``gsm8k_math`` and ``tool_agent``, and the fleet of ``tiny`` that each would start."""
    printed = run("-m", "examples.two_runs_one_fleet", "--tiny")
    assert "gsm8k-rank1 ended with code 0" in printed
    assert "tool-agent ended with code 0" in printed
    seen = {name for line in printed.splitlines() if line.startswith("ready: ")
            for name in line.removeprefix("ready: ").split(", ")}  # fmt: skip
    assert {"gsm8k-rank1-v1", "tool-agent-v1"} <= seen
    calls = re.findall(r"'tools/call_frequency': '?([\d.]+)", printed)
    assert any(float(frequency) > 0 for frequency in calls), printed[-3000:]


@dataclass
class Published:
    """A model, the bucket with a run of it, and what the example printed."""

    model: Path
    bucket: str
    printed: str


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """``sft_live_preview``, on a model that outlives it."""
    folder = tmp_path_factory.mktemp("preview")
    model = build(folder / "model", warm_up_steps=1)
    (folder / "bucket").mkdir()
    bucket = (folder / "bucket").as_uri()
    printed = run(
        "-m", "examples.sft_live_preview", "--tiny", "--bucket-url", bucket, "--model", model
    )
    return Published(model, bucket, printed)


def test_supervised_training_publishes_while_it_runs(published: Published) -> None:
    assert "sft-preview-v2: step 4, rank 16" in published.printed
    manifest = RunReader(open_store(published.bucket), "sft-preview").poll()
    assert manifest is not None
    assert manifest.state == "finished"


def test_the_recipe_names_the_model_that_the_launchers_serve() -> None:
    assert MODEL in (ROOT / "deploy" / "hf-jobs" / "run.yaml").read_text()

"""A run's description, a fake Hub, and the launcher as a process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.hf_jobs.fake_hub import TOKEN, FakeHub, serve
from trl_async_bucket.launch.hf_jobs import launch

S3_SECRET = "s3-secret-of-the-test"
RUN = """
name: math-1
bucket: hf://buckets/me/rl/team
model: Qwen/Qwen2.5-1.5B
secrets: [AWS_SECRET_ACCESS_KEY]
env: {WANDB_MODE: offline}
replicas:
  count: 2
  flavor: t4-small
  args: [--max-lora-rank, "16", --max-loras, "7"]
trainer:
  flavor: a100-large
  script: train.py
  args: [--learning_rate, "1e-5"]
"""
_DRIVER = (
    "import sys; from pathlib import Path; from trl_async_bucket.launch import hf_jobs; "
    "sys.exit(hf_jobs.launch(Path(sys.argv[1]), dry_run=False, poll_s=0.05))"
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve() as running:
        yield running


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('training')\n")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@dataclass
class Ended:
    """A launcher that has ended."""

    code: int
    output: str


@dataclass
class Launcher:
    """Starts ``launch`` against the fake Hub."""

    hub: FakeHub
    run_file: Path
    home: Path

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HF_ENDPOINT": self.hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        }

    def run(self) -> Ended:
        """In this process: the client's import takes longer than a whole run."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HF_TOKEN", "HF_HOME", "AWS_SECRET_ACCESS_KEY"):
                patch.setenv(name, self.environment()[name])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = launch(self.run_file, dry_run=False, poll_s=0.05, endpoint=self.hub.url)
        return Ended(code, printed.getvalue())

    def run_until(self, condition: Callable[[], bool], number: int) -> Ended:
        """As a process: send it a signal once the condition holds; wait for its end."""
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, self.run_file],
            env=self.environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if condition():
                    process.send_signal(number)
                    break
                time.sleep(0.01)
            output, _ = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return Ended(process.returncode, output)


@pytest.fixture
def launcher(hub: FakeHub, run_file: Path, tmp_path: Path) -> Launcher:
    return Launcher(hub, run_file, tmp_path / "home")

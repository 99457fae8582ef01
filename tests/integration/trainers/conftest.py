"""One real replica on a folder, for the tests of every kind of trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter_bucket.fetch import RunReader
from adapter_bucket.manifest import Manifest
from adapter_bucket.stores import open_store
from demo.fleet import Server, start_replica, wait_healthy
from demo.processes import Processes
from demo.tiny_model import build


@dataclass
class Place:
    """The replica, and how to run a trainer against it."""

    processes: Processes
    out: Path
    model: Path
    bucket: str
    replica: Server

    def train(
        self,
        module: str,
        name: str,
        *extra: str,
        ranks: int = 1,
        trl: Path | None = None,
        timeout_s: float = 300,
    ) -> Path:
        """Run a trainer, in as many processes as ``ranks``, to its clean end; its output folder."""
        out = self.out / name
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [
            sys.executable, *(torchrun if ranks > 1 else []), "-m", module,
            "--model", str(self.model), "--server", self.replica.url, "--bucket", self.bucket,
            "--run-id", name, "--out", str(out), *extra,
        ]  # fmt: skip
        paths = [str(trl)] if trl else []
        paths += [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[3])]
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        trainer = self.processes.start(name, command, env=env)
        try:
            self.processes.wait_until(
                f"{name} to end",
                lambda: trainer.process.poll() is not None,
                timeout_s=timeout_s,
                watch=[self.replica.child],
            )
        finally:
            trainer.kill()  # one that hangs would slow down every test after it
        assert trainer.process.returncode == 0, trainer.log_path.read_text()[-4000:]
        return out

    def manifest(self, run_id: str) -> Manifest:
        """What is in the bucket of a run."""
        found = RunReader(open_store(self.bucket), run_id).poll()
        assert found is not None
        return found


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    out = tmp_path_factory.mktemp("trainers")
    model, bucket = build(out / "model"), f"file://{out}/bucket"
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        # Room for the last versions of all runs here.
        replica = start_replica(processes, "replica", model, bucket, "--max-loras", "24")
        wait_healthy(processes, [replica])
        yield Place(processes, out, model, bucket, replica)

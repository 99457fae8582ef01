"""The whole loop, started once: two replicas on a real S3 server, the proxy, and a stock server.

The parts are the demo's: what is tested here is what `make demo` runs, over S3 instead of a folder.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from demo.fleet import (
    Server,
    start_proxy,
    start_replica,
    start_stock_server,
    start_trainer,
    wait_healthy,
)
from demo.observe import read_metrics
from demo.processes import Child, Processes
from demo.tiny_model import build
from tests.s3_servers import S3Server, seaweed, seaweed_pair

__all__ = ["seaweed", "seaweed_pair"]

RUN_ID = "loop"
FIRST_RUN_STEPS = 80
INTERRUPT_S = 60.0


@dataclass
class Fleet:
    """Everything that runs, and how to start a trainer against it."""

    processes: Processes
    model: Path
    bucket: str
    env: dict[str, str]
    out: Path
    proxy: Server
    stock: Server
    replicas: dict[str, Server] = field(default_factory=dict)

    def store(self, monkeypatch: pytest.MonkeyPatch) -> Store:
        """The bucket, opened in this process."""
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return open_store(self.bucket)

    def start_replica(self, name: str, *, port: int | None = None) -> Server:
        """Start a replica of this fleet, at the port of a dead one if given."""
        return start_replica(self.processes, name, self.model, self.bucket, port=port, env=self.env)

    @contextmanager
    def trainer(self, name: str, *extra: str, steps: int) -> Iterator[Child]:
        """A trainer with the bucket; its metrics go to ``metrics(name)``.

        It has ended when this is left, however that happens: it would own the run, and the
        processor, in every test that follows.
        """
        started = start_trainer(
            self.processes, self.model, self.proxy.url, self.out / name,
            "--bucket", self.bucket, "--run-id", RUN_ID, "--steps", str(steps), *extra,
            name=name, env=self.env,
        )  # fmt: skip
        with ended(started):
            yield started

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """What the trainer logged so far, a row per step."""
        return read_metrics(self.out / name / "metrics.jsonl")

    def wait_trained(self, trainer: Child, *, timeout_s: float) -> None:
        """Wait for a trainer's clean end."""
        self.processes.wait_until(
            f"{trainer.name} to end",
            lambda: trainer.process.poll() is not None,
            timeout_s=timeout_s,
            watch=[server.child for server in (self.proxy, *self.replicas.values())],
        )
        tail = trainer.log_path.read_text(errors="replace")[-3000:]
        assert trainer.process.returncode == 0, tail


@contextmanager
def ended(trainer: Child) -> Iterator[None]:
    """Interrupt the trainer if it still runs at the end, so that its run can be claimed again."""
    try:
        yield
    finally:
        if trainer.process.poll() is None:
            trainer.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                trainer.process.wait(INTERRUPT_S)
        trainer.kill()  # also what it left behind


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory, seaweed: S3Server) -> Iterator[Fleet]:
    """Two replicas, proxy and a stock server, all healthy."""
    out = tmp_path_factory.mktemp("loop")
    model = build(out / "model")
    bucket = seaweed.url(seaweed.new_bucket(), "rl")
    env = {**seaweed.environment, "AWS_REGION": "us-east-1"}
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        names = ("replica-1", "replica-2")
        replicas = {name: start_replica(processes, name, model, bucket, env=env) for name in names}
        stock = start_stock_server(processes, model)
        proxy = start_proxy(processes, list(replicas.values()))
        wait_healthy(processes, [*replicas.values(), proxy, stock])
        yield Fleet(processes, model, bucket, env, out, proxy, stock, replicas)


@pytest.fixture(scope="package")
def first_run(fleet: Fleet) -> list[dict[str, Any]]:
    """Metrics of a whole run over the bucket."""
    with fleet.trainer("first", steps=FIRST_RUN_STEPS) as trainer:
        fleet.wait_trained(trainer, timeout_s=240)
    return fleet.metrics("first")


@pytest.fixture(scope="package")
def stock_run(fleet: Fleet, first_run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics of stock TRL's adapter sync: same script, model and machine, after the first run."""
    trainer = start_trainer(
        fleet.processes, fleet.model, fleet.stock.url, fleet.out / "stock",
        "--stock", "--steps", "25", name="stock-trainer",
    )  # fmt: skip
    with ended(trainer):
        fleet.wait_trained(trainer, timeout_s=180)
    return fleet.metrics("stock")

"""All processes of the matrix, with a link before each way that a fault may hit.

Servers live as long as the world does, whatever run they serve; a fault that kills one starts it
again where it was.
"""

from __future__ import annotations

import datetime
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import trustme

from demo.fleet import Server, start_replica
from demo.processes import Processes, free_port
from demo.s3_server import BUCKET, S3Demo, start_s3
from demo.tiny_model import build
from tests.faults.matrix.clocks import Clock, build_library
from tests.faults.matrix.disks import Disk
from tests.faults.matrix.hub import Hub
from tests.faults.matrix.links import HttpLink, Network, RawLink
from tests.faults.matrix.moments import VICTIM, Moments
from tests.faults.matrix.recorder import Recorder
from tests.faults.matrix.trainers import Trainers

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

REPLICAS = (VICTIM, "replica-2")
HEALTHY_S = 400.0
OPERATOR_WAITS_S = 5.0

TRAINER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


ONE_PROCESS_LESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine's process runs the model, as on one GPU. vLLM's CPU build else starts a worker for it,
which spins on a core for a second after each step: two replicas would leave no core for the rest.
The server's process and the engine's stay apart: an asynchronous server ignores the switch."""


@dataclass
class Proxy:
    """The proxy with its certificate and tokens, which faults change."""

    folder: Path
    processes: Processes
    replicas: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    authority: trustme.CA = field(default_factory=trustme.CA)
    process: Any = None

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def client_env(self) -> dict[str, str]:
        """For clients that shall believe its certificate: requests, and aiohttp."""
        return {"REQUESTS_CA_BUNDLE": str(self.ca_file), "SSL_CERT_FILE": str(self.ca_file)}

    def write(self, *, valid_s: float = 86_400.0, also: str | None = None) -> None:
        """Write certificate and token file; ``also`` is accepted beside the token."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority.cert_pem.write_to_path(str(self.ca_file))
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=valid_s)
        issued = self.authority.issue_cert("127.0.0.1", not_after=end)
        issued.private_key_and_cert_chain_pem.write_to_path(str(self.folder / "pair.pem"))
        tokens = [self.token, *([also] if also else [])]
        (self.folder / "tokens").write_text("\n".join(tokens) + "\n")

    def start(self) -> None:
        """Start it at its port."""
        pair = str(self.folder / "pair.pem")
        command = [
            sys.executable, "-m", "bucket_lora_proxy", "--port", str(self.port),
            "--tls-cert", pair, "--tls-key", pair, "--token-file", str(self.folder / "tokens"),
            *(f"--replica={url}" for url in self.replicas),
        ]  # fmt: skip
        self.process = self.processes.start("proxy", command)

    def restart(self) -> None:
        """End it as its operator does, and start it with what is written now."""
        self.process.process.terminate()
        try:
            self.process.process.wait(OPERATOR_WAITS_S)
        except subprocess.TimeoutExpired:  # it waits for an answer that the harness holds
            self.process.kill()
        self.start()

    def get(self, path: str) -> requests.Response:
        """Ask it, not through a link."""
        return requests.get(
            f"https://127.0.0.1:{self.port}{path}",
            auth=("x", self.token), verify=str(self.ca_file), timeout=5,
        )  # fmt: skip

    def healthy(self) -> bool:
        """Whether it has both replicas."""
        try:
            return bool(self.get("/health").json().get("healthy") == len(self.replicas))
        except (requests.RequestException, ValueError):
            return False


@dataclass
class World:
    """Everything that runs."""

    out: Path
    processes: Processes
    network: Network
    moments: Moments
    recorder: Recorder
    hub: Hub
    model: Path
    s3: S3Demo
    store_links: dict[str, HttpLink]
    """By process: before the bucket."""
    replica_links: dict[str, HttpLink]
    """By replica: between the proxy and it."""
    trainer_proxy: RawLink
    replicas: dict[str, Server]
    proxy: Proxy
    trainers: Trainers
    clocks: dict[str, Clock]
    disks: dict[str, Disk]
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def store(self) -> S3Client:
        """The bucket itself, behind no link."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self._endpoint,
            region_name=self.s3.env["AWS_REGION"],
            aws_access_key_id=self.s3.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.s3.env["AWS_SECRET_ACCESS_KEY"],
        )

    @property
    def bucket(self) -> str:
        return BUCKET

    @property
    def _endpoint(self) -> str:
        return self.s3.url.partition("endpoint_url=")[2]

    def url_through(self, process: str) -> str:
        """The bucket as one process sees it."""
        endpoint = f"http://127.0.0.1:{self.store_links[process].port}"
        return self.s3.url.partition("?")[0] + f"?endpoint_url={endpoint}"

    @property
    def server_url(self) -> str:
        """The proxy as a trainer sees it."""
        return f"https://x:{self.proxy.token}@127.0.0.1:{self.trainer_proxy.port}"

    def start_replica(self, name: str) -> None:
        """Start it at the port it always has."""
        clock = self.clocks.get(name)
        env = {**self.s3.env, **ONE_PROCESS_LESS, **(clock.environment if clock else {})}
        server = start_replica(
            self.processes, name, self.model, self.url_through(name),
            "--bucket-lora-cache-dir", str(self.disks[name].path),
            port=self._ports[name], env=env,
        )  # fmt: skip
        # The same object for whoever watches it.
        if name in self.replicas:
            self.replicas[name].child = server.child
        else:
            self.replicas[name] = server

    def restart_store(self) -> None:
        """Start the S3 server again, on its ports and its data."""
        command = self.s3.child.process.args
        assert isinstance(command, list)
        child = self.processes.start("s3", command, env={**self.s3.env, "GOMEMLIMIT": "400MiB"})
        object.__setattr__(self.s3, "child", child)

    def pids(self) -> dict[str, int]:
        """Of the servers that live through everything."""
        return {
            "proxy": self.proxy.process.pid,
            **{name: server.child.pid for name, server in self.replicas.items()},
        }


def wait_for(what: str, is_true: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait for a condition.

    Raises:
        RuntimeError: time ran out.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} took longer than {timeout_s:.0f} s")
        time.sleep(0.2)


@contextmanager
def running_world(out: Path, *, warm_up_steps: int = 60) -> Iterator[World]:
    """Start everything, and end everything."""
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        processes = stack.enter_context(Processes(out / "logs", lambda _name, _line: None))
        library = build_library(out)
        names = ("trainer", *REPLICAS)
        clocks = {n: Clock(library, out / f"{n}.clock") for n in names} if library else {}
        disks = {}
        for name in names:
            disks[name] = Disk(out / "disks" / name)
            stack.callback(disks[name].close)
        s3 = start_s3(processes, out / "s3")
        moments = Moments()
        recorder = Recorder(moments)
        clock = clocks.get("trainer")
        proxy = Proxy(out / "proxy", processes)
        proxy.write()
        trainers = Trainers(
            processes,
            out / "logs",
            {
                **TRAINER_ENV, **s3.env, **proxy.client_env,
                **(clock.environment if clock else {}),
            },
        )  # fmt: skip
        stack.callback(trainers.close)
        model = build(out / "model", warm_up_steps=warm_up_steps)
        store_port = urlsplit(s3.url.partition("endpoint_url=")[2]).port
        assert store_port is not None
        store_links = {n: HttpLink(network, f"{n}-store", store_port, recorder) for n in names}
        ports = {name: free_port() for name in REPLICAS}
        replica_links = {
            name: HttpLink(network, f"proxy-{name}", ports[name], recorder) for name in REPLICAS
        }
        proxy.replicas = [f"http://127.0.0.1:{link.port}" for link in replica_links.values()]
        world = World(
            out, processes, network, moments, recorder, Hub(network, moments), model, s3,
            store_links, replica_links, RawLink(network, proxy.port), {}, proxy, trainers, clocks,
            disks, ports,
        )  # fmt: skip
        for name in REPLICAS:
            world.start_replica(name)
        proxy.start()
        trainers.wait()
        wait_for("the fleet", proxy.healthy, timeout_s=HEALTHY_S)
        # Left-over stops must not survive us: a stopped process takes no SIGTERM.
        stack.callback(lambda: _go_on(world))
        yield world


def _go_on(world: World) -> None:
    for child in [world.s3.child, world.proxy.process, *(s.child for s in world.replicas.values())]:
        if child.process.poll() is None:
            os.killpg(child.pid, signal.SIGCONT)

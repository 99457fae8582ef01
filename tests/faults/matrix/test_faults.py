"""Each fault does what it says, and ends: on a real S3 server, a real proxy and real disks."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from demo.processes import Processes, free_port
from demo.s3_server import start_s3
from tests.faults.matrix.cells import FAULTS, Cell
from tests.faults.matrix.clocks import Clock, build_library
from tests.faults.matrix.disks import Disk
from tests.faults.matrix.faults import Scene, inflict
from tests.faults.matrix.hub import Hub
from tests.faults.matrix.links import HttpLink, Network, RawLink
from tests.faults.matrix.moments import Moments
from tests.faults.matrix.recorder import Record, Recorder
from tests.faults.matrix.world import Proxy, World, wait_for

pytestmark = pytest.mark.timeout(120)

RUN = "run-1"
WEIGHTS = f"demo/runs/{RUN}/adapters/v00000002/adapter_model.safetensors"
FAULTS_BY_KEY = {fault.key: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Everything but vLLM and trainers."""
    out = tmp_path_factory.mktemp("world")
    with Network() as network, Processes(out / "logs", lambda _name, _line: None) as processes:
        s3 = start_s3(processes, out / "s3")
        port = urlsplit(s3.url.partition("endpoint_url=")[2]).port
        assert port is not None
        library = build_library(out)
        moments = Moments()
        links = {
            name: HttpLink(network, f"{name}-store", port) for name in ("trainer", "replica-1")
        }
        proxy = Proxy(out / "proxy", processes, [f"http://127.0.0.1:{free_port()}"])
        proxy.write()
        proxy.start()
        disk = Disk(out / "disk")
        nothing: Any = None
        replica_links = {"replica-1": HttpLink(network, "proxy-replica-1", port)}
        made = World(
            out, processes, network, moments, Recorder(moments), Hub(network, moments), out, s3,
            links, replica_links, RawLink(network, proxy.port), {}, proxy, nothing,
            {"trainer": Clock(library, out / "clock")} if library else {}, {"trainer": disk},
        )  # fmt: skip
        wait_for("the proxy", lambda: answers(made) == 503, timeout_s=30)
        try:
            yield made
        finally:
            disk.close()


def hit(world: World, key: str, phase: str, probe: Any, *, hold_factor: float = 0.02) -> None:
    """Inflict a fault; ``probe`` is called while it is there."""
    probed = []

    def release() -> None:
        probe()
        probed.append(True)

    nothing: Any = None
    scene = Scene(world, Record(RUN, world.out), nothing, phase, hold_factor=hold_factor)
    inflict(Cell(FAULTS_BY_KEY[key], phase), scene, release)
    assert probed == [True]


def through(world: World, *, timeout_s: float = 0.5) -> Any:
    """The bucket as a trainer reaches it."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{world.store_links['trainer'].port}",
        region_name="us-east-1",
        aws_access_key_id=world.s3.env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=world.s3.env["AWS_SECRET_ACCESS_KEY"],
        config=Config(
            connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1}
        ),
    )


def put(world: World, **options: float) -> str:
    """What comes of writing an object: an error's name, or ``ok``."""
    client = through(world, **options)
    try:
        client.put_object(Bucket=world.bucket, Key="probe", Body=b"x")
        return "ok"
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    except BotoCoreError as error:
        return type(error).__name__
    finally:
        client.close()


def answers(world: World, token: str | None = None) -> int | str:
    """What the proxy answers to a trainer: its status, or an error's name."""
    try:
        return requests.get(
            f"https://127.0.0.1:{world.trainer_proxy.port}/health",
            auth=("x", token or world.proxy.token), verify=str(world.proxy.ca_file), timeout=5,
        ).status_code  # fmt: skip
    except requests.RequestException as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("key", "errors"),
    [
        ("cut/trainer-store", {"ReadTimeoutError", "ConnectTimeoutError"}),
        ("503/store", {"SlowDown"}),
        ("read-only/store", {"AccessDenied"}),
        ("stop/store", {"ReadTimeoutError", "ConnectTimeoutError"}),
    ],
)
def test_the_store_fails_and_is_well_again(world: World, key: str, errors: set[str]) -> None:
    seen = []
    hit(world, key, "publish", lambda: seen.append(put(world)))
    assert set(seen) <= errors
    wait_for("the store", lambda: put(world, timeout_s=5) == "ok", timeout_s=20)


def test_a_killed_store_comes_back_with_its_data(world: World) -> None:
    assert put(world, timeout_s=5) == "ok"
    seen = []
    hit(world, "kill/store", "publish", lambda: seen.append(put(world)))
    assert seen != ["ok"]
    wait_for("the store", lambda: put(world, timeout_s=5) == "ok", timeout_s=30)
    assert world.store.get_object(Bucket=world.bucket, Key="probe")["Body"].read() == b"x"


def test_latency_is_added_to_every_answer(world: World) -> None:
    def probe() -> None:
        begun = time.monotonic()
        assert put(world, timeout_s=5) == "ok"
        assert time.monotonic() - begun >= 0.5

    hit(world, "latency/store", "publish", probe)


def test_one_byte_of_the_newest_weights_is_flipped(world: World) -> None:
    data = bytes(1000)
    world.store.put_object(Bucket=world.bucket, Key=WEIGHTS, Body=data)
    manifest = json.dumps({"latest": 2}).encode()
    key = f"demo/runs/{RUN}/manifest.json"
    world.store.put_object(Bucket=world.bucket, Key=key, Body=manifest)
    hit(world, "corrupt/store", "load", lambda: None)
    found = world.store.get_object(Bucket=world.bucket, Key=WEIGHTS)["Body"].read()
    assert sum(a != b for a, b in zip(data, found, strict=True)) == 1


def test_a_full_disk_takes_no_byte_until_it_is_freed(world: World) -> None:
    disk = world.disks["trainer"]
    if not disk.can_be_full:
        pytest.skip("only root can mount a small disk")

    def probe() -> None:
        with pytest.raises(OSError, match="space") as caught:
            (disk.path / "file").write_bytes(b"x")
        assert caught.value.errno == errno.ENOSPC

    hit(world, "disk/machine", "publish", probe)
    (disk.path / "file").write_bytes(b"x")


def test_the_clock_of_one_process_jumps_while_it_runs(world: World) -> None:
    clock = world.clocks.get("trainer")
    if clock is None:
        pytest.skip("no C compiler")
    ask = (
        "import datetime, sys, time\n"
        "for _ in sys.stdin: print(time.time(), datetime.datetime.now().timestamp(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ask],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clock.environment,
    ) as process:  # fmt: skip

        def ahead() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return [float(word) - time.time() for word in process.stdout.readline().split()]

        assert ahead() == pytest.approx([0, 0], abs=5)
        hit(
            world, "clock/trainer", "publish",
            lambda: ahead() == pytest.approx([3600, 3600], abs=5) or pytest.fail("no jump"),
        )  # fmt: skip
        assert ahead() == pytest.approx([0, 0], abs=5)
        assert process.stdin is not None
        process.stdin.close()


def test_the_proxys_certificate_expires_and_is_renewed(world: World) -> None:
    hit(world, "certificate/proxy", "publish", lambda: expect(answers(world), "SSLError"))
    wait_for("the proxy", lambda: answers(world) == 503, timeout_s=20)


@pytest.mark.parametrize(("key", "old"), [("token/proxy", 401), ("token-overlap/proxy", 503)])
def test_the_proxys_token_is_rotated(world: World, key: str, old: int) -> None:
    before = world.proxy.token
    hit(world, key, "generation", lambda: None)
    wait_for("the proxy", lambda: answers(world) == 503, timeout_s=20)
    assert world.proxy.token != before
    assert answers(world, before) == old


def expect(found: object, wanted: object) -> None:
    assert found == wanted

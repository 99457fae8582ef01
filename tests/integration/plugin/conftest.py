"""One server for all tests of this folder: it has been killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plugin.runs import KEYS, TestRun
from tests.integration.plugin.server import Server, running_server
from tests.integration.plugin.tiny_model import build_base

RunMaker = Callable[..., TestRun]


@dataclass(frozen=True)
class FirstLife:
    """What was there before the server was killed."""

    run: TestRun
    ready: list[str]
    sessions: list[str]
    """Its directories in the cache folder."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("model") / "tiny-base")


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bucket")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def flags(bucket: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    keys = tmp_path_factory.mktemp("keys") / "signing-keys"
    keys.write_text(",".join(f"{key_id}:{key.hex()}" for key_id, key in KEYS.keys))
    return [
        "--plugin=bucket-lora",
        f"--bucket-lora-signing-key-file={keys}",
        f"--bucket-lora-url=file://{bucket}",
        f"--bucket-lora-cache-dir={cache_dir}",
    ]


@pytest.fixture(scope="session")
def first_life(
    base: Path,
    bucket: Path,
    cache_dir: Path,
    flags: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> FirstLife:
    """Start a server, let it serve a run, and kill it."""
    run = TestRun(bucket, base, "first-life")
    for version in (1, 2, 3, 4):
        run.publish(version)
    log = tmp_path_factory.mktemp("first") / "server.log"
    with running_server(str(base), log, flags) as server:
        for version in (2, 3, 4):
            server.status(run.name(version), wait_s=20)
        ready = server.status().ready
        server.kill()
    return FirstLife(run, ready, sorted(path.name for path in cache_dir.iterdir()))


@pytest.fixture(scope="session")
def server(
    first_life: FirstLife, base: Path, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("second") / "server.log"
    with running_server(str(base), log, flags) as server:
        yield server


@pytest.fixture
def new_run(bucket: Path, base: Path) -> Iterator[RunMaker]:
    """Make runs that end with the test, so that they leave their slots to the next one."""
    made: list[TestRun] = []

    def make(run_id: str, **settings: Any) -> TestRun:
        made.append(TestRun(bucket, base, run_id, **settings))
        return made[-1]

    yield make
    for run in made:
        run.finish()

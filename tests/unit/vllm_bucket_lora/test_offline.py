"""A run followed by hand: the newest version, one at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import ConfigError, NotPublished
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.probe import Probe
from tests.unit.vllm_bucket_lora.bucket import PROBE, SERVED, claim, publish
from vllm_bucket_lora.offline import Follower
from vllm_bucket_lora.ports import ProbeFailed


class Engine:
    """Remembers what is loaded; a request is its name."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.wrong = False

    def add(self, name: str, path: Path) -> str:
        assert (path / "adapter_config.json").is_file()
        self.loaded.append(name)
        return name

    def remove(self, name: str) -> None:
        self.loaded.remove(name)

    def prove(self, request: str, probe: Probe) -> None:
        assert probe == PROBE
        if self.wrong:
            raise ProbeFailed("its probe failed")


def following(store: MemoryStore, engine: Engine, cache: Path) -> Follower:
    return Follower(
        store,
        "run-a",
        served=SERVED,
        add=engine.add,
        remove=engine.remove,
        prove=engine.prove,
        cache_dir=cache,
    )


def test_a_version_whose_probe_fails_does_not_replace_the_loaded_one(tmp_path: Path) -> None:
    store, engine = MemoryStore(), Engine()
    writer = claim(store)
    publish(writer, 1, probe=PROBE)
    with following(store, engine, tmp_path) as run:
        assert run.newest() == "run-a-v1"
        engine.wrong = True
        publish(writer, 2, probe=PROBE)
        with pytest.raises(ProbeFailed):
            run.newest()
        assert (engine.loaded, run.version) == (["run-a-v1"], 1)
        engine.wrong = False
        assert run.newest() == "run-a-v2"


def test_each_call_gives_the_newest_version_and_one_is_loaded(tmp_path: Path) -> None:
    store, engine = MemoryStore(), Engine()
    writer = claim(store)
    with following(store, engine, tmp_path) as run:
        publish(writer, 1)
        assert run.newest() == "run-a-v1"
        assert run.newest() == "run-a-v1"
        publish(writer, 2)
        publish(writer, 3)
        assert run.newest() == "run-a-v3"
        assert (engine.loaded, run.version) == (["run-a-v3"], 3)
        assert [path.name for path in tmp_path.glob("*/adapters/*/*")] == ["v00000003"]
    assert engine.loaded == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_version_can_be_waited_for(tmp_path: Path) -> None:
    store, engine = MemoryStore(), Engine()
    with following(store, engine, tmp_path) as run:
        with pytest.raises(NotPublished, match="wait_s"):
            run.newest()
        timer = threading.Timer(0.1, lambda: publish(claim(store), 1))
        timer.start()
        assert run.newest(wait_s=5) == "run-a-v1"
        timer.join()


def test_what_the_engine_cannot_serve_is_an_error_with_the_value_to_change(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    publish(claim(store), 1, r=16, lora_alpha=32)
    with (
        following(store, Engine(), tmp_path) as run,
        pytest.raises(ConfigError, match="--max-lora-rank 16"),
    ):
        run.newest()
    other = MemoryStore()
    publish(claim(other, base=BaseModelRef(id="models/other")), 1)
    with (
        following(other, Engine(), tmp_path) as run,
        pytest.raises(ConfigError, match="models/other"),
    ):
        run.newest()

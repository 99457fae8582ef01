"""One name, one set of bytes: also where somebody gives a deleted run's id to another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.layout import run_prefix
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from tests.unit.vllm_bucket_lora.bucket import adapter_bytes, claim, publish
from tests.unit.vllm_bucket_lora.harness import following, watching
from tests.unit.vllm_bucket_lora.test_offline import Engine
from tests.unit.vllm_bucket_lora.test_offline import following as following_offline
from vllm_bucket_lora import run as run_module
from vllm_bucket_lora.names import Names
from vllm_bucket_lora.service import Service


def start_again(store: MemoryStore, *, window: int = 2) -> RunWriter:
    """Delete all of the run by hand, and begin another one under its id."""
    store.delete(list(store.list(run_prefix("run-a"))))
    return claim(store, window=window)


def publish_other(writer: RunWriter, version: int) -> None:
    publish(writer, version, adapter_bytes(100.0 + version))


def test_a_run_that_goes_on_reuses_no_name() -> None:
    store, names = MemoryStore(), Names()
    writer = claim(store, window=1)
    for version in range(1, 6):
        publish(writer, version)
        assert names.learn(writer.manifest) == set()
        assert names.learn(writer.manifest) == set()
    successor = RunWriter.claim(
        store, "run-a", base_model=writer.manifest.base_model, window=3, writer_id="next",
        takeover=True, check=False,
    )  # fmt: skip
    publish(successor, 9)
    assert names.learn(successor.manifest) == set()


def test_a_name_that_stood_for_other_bytes_is_known_for_ever() -> None:
    store, names = MemoryStore(), Names()
    writer = claim(store, window=2)
    for version in (1, 2, 3):
        publish(writer, version)
    names.learn(writer.manifest)
    writer = start_again(store)
    for version, reused in ((1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (4, {2, 3}), (5, {3})):
        publish_other(writer, version)
        assert names.learn(writer.manifest) == reused, version


async def state(service: Service, name: str) -> tuple[str, str]:
    found = (await service.answer(name, 0.0)).adapter
    assert found is not None
    return found.state.value, str(found.reason)


@pytest.mark.anyio
async def test_the_old_runs_bytes_are_not_served_under_the_new_runs_names(tmp_path: Path) -> None:
    async with following(tmp_path, window=2) as (bench, writer):
        store = writer._store
        assert isinstance(store, MemoryStore)
        for version in (2, 3):
            publish(writer, version)
        await bench.until(lambda: bench.ready() == [2, 3])
        writer = start_again(store)
        run = bench.watcher.runs["run-a"]
        for version in (1, 2, 3):
            publish_other(writer, version)
        await bench.until(lambda: run.fault is None or IntegrityError.__name__ in run.fault)
        publish_other(writer, 4)
        await bench.until(lambda: bench.ready() == [4])
        assert "forget run-a-v3" in bench.engine.calls
        assert bench.engine.routable == {"run-a-v4"}
        assert "stood for other bytes" in (await state(bench.service, "run-a-v3"))[1]
        bench.watcher.engine_wakes()  # what failed a probe is tried again; this is not
        publish_other(writer, 5)
        await bench.until(lambda: bench.ready() == [4, 5])


@pytest.mark.anyio
async def test_a_name_is_remembered_beyond_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "GONE_AFTER_S", 0.05)
    store = MemoryStore()
    publish(claim(store, window=2), 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1])
        store.delete(list(store.list(run_prefix("run-a"))))
        await bench.until(lambda: "run-a" not in bench.watcher.runs)
        writer = start_again(store)
        publish_other(writer, 1)
        run = await bench.run()
        await bench.until(lambda: 1 in run.refused)
        publish_other(writer, 2)
        await bench.until(lambda: bench.ready() == [2])


@pytest.mark.anyio
async def test_a_version_that_its_run_does_not_have_any_more_is_let_go(tmp_path: Path) -> None:
    async with following(tmp_path, window=2) as (bench, writer):
        store = writer._store
        assert isinstance(store, MemoryStore)
        publish(writer, 2)
        await bench.until(lambda: bench.ready() == [1, 2])
        start_again(store)
        for _ in range(2):  # raises the epoch above the old run's
            RunWriter.claim(
                store, "run-a", base_model=writer.manifest.base_model, window=2, writer_id="next",
                takeover=True, check=False,
            )  # fmt: skip
        await bench.until(lambda: bench.ready() == [])
        assert bench.engine.routable == set()


def test_a_notebook_does_not_take_another_run_for_the_one_it_follows(tmp_path: Path) -> None:
    store, engine = MemoryStore(), Engine()
    publish(claim(store, window=2), 1)
    with following_offline(store, engine, tmp_path) as run:
        assert run.newest() == "run-a-v1"
        writer = start_again(store)
        publish_other(writer, 1)
        with pytest.raises(ConfigError, match="stood for other bytes"):
            run.newest()
        publish_other(writer, 2)
        assert run.newest() == "run-a-v2"
        assert engine.loaded == ["run-a-v2"]

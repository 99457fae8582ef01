"""Faults that must stay where they are: one version's, one run's, this process's disk."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Literal

import pytest

from adapter_bucket.layout import manifest_key
from adapter_bucket.memory_store import MemoryStore
from tests.unit.vllm_bucket_lora.bucket import claim, publish
from tests.unit.vllm_bucket_lora.harness import following, watching
from vllm_bucket_lora import blocking, watcher

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "FAULT_PAUSE_S", 0.01)


async def test_a_disk_that_was_full_ends_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with following(tmp_path, window=1, processes=2) as (bench, writer):
        shutil.rmtree(tmp_path / "servers")  # where this process tells the others what it holds
        publish(writer, 2)
        await bench.until(lambda: "FileNotFoundError" in str(bench.watcher.fault))
        publish(writer, 3)
        await bench.until(lambda: 3 in bench.watcher.runs["run-a"].entries())
        (tmp_path / "servers").mkdir()
        await bench.until(lambda: bench.ready() == [3])
        await bench.until(lambda: bench.shelf.names == ["run-a-v3"])
        await bench.until(lambda: bench.files() == ["v00000003"])
        await bench.until(lambda: bench.watcher.fault is None)


async def test_a_version_that_fails_unforeseen_does_not_keep_others_out(tmp_path: Path) -> None:
    async with following(tmp_path) as (bench, writer):
        bench.engine.break_on = {"run-a-v2"}
        publish(writer, 2)
        run = bench.watcher.runs["run-a"]
        await bench.until(lambda: 2 in run.retries)
        publish(writer, 3)
        await bench.until(lambda: bench.ready() == [1, 3])
        assert "nobody foresaw this" in run.retries[2].reason
        bench.engine.break_on = set()
        await bench.until(lambda: bench.ready() == [1, 2, 3])


@pytest.mark.parametrize("pattern", ["q{99999999999}", "(" * 9999 + "q" + ")" * 9999, "(q"])
async def test_a_rank_pattern_that_is_no_regex_fits_no_module(tmp_path: Path, pattern: str) -> None:
    async with following(tmp_path) as (bench, writer):
        publish(writer, 2, rank_pattern={pattern: 2})
        await bench.until(lambda: bench.ready() == [1, 2])


async def test_a_run_that_cannot_be_read_as_nobody_foresaw_does_not_keep_others_out(
    tmp_path: Path,
) -> None:
    def fail(phase: Literal["before", "after"], call: str, key: str) -> None:
        if key == manifest_key("run-a") and call == "get":
            raise RuntimeError("nobody foresaw this")

    store = MemoryStore()
    for run_id in ("run-a", "run-b"):
        publish(claim(store, run_id), 1)
    store.hook = fail
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready("run-b") == [1])
        assert "nobody foresaw this" in str((await bench.run("run-a")).fault)
        store.hook = None
        await bench.until(lambda: bench.ready("run-a") == [1])


async def test_a_listing_that_fails_as_nobody_foresaw_does_not_stop_the_known_runs(
    tmp_path: Path,
) -> None:
    def fail(phase: Literal["before", "after"], call: str, key: str) -> None:
        if call == "list_dirs":
            raise RuntimeError("nobody foresaw this")

    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1])
        store.hook = fail
        await bench.until(lambda: "nobody foresaw this" in str(bench.watcher.fault))
        publish(writer, 2)
        await bench.until(lambda: bench.ready() == [1, 2])


async def test_a_run_without_a_manifest_is_forgotten_when_it_leaves_the_listing(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    store.overwrite("runs/leftover/replicas/r-9.json", b"{}")
    store.overwrite(manifest_key("damaged"), b"{}")
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: {"leftover", "damaged"} == set(bench.watcher.runs))
        await bench.until(lambda: "damaged" in bench.service.status().runs)
        store.delete(list(store.list("")))
        await bench.until(lambda: not bench.watcher.runs)
        await bench.until(lambda: not bench.service.status().runs)


async def test_a_call_to_sleep_that_was_given_up_leaves_the_server_awake(tmp_path: Path) -> None:
    held = threading.Event()

    def hold(phase: Literal["before", "after"], call: str, key: str) -> None:
        if (phase, call) == ("before", "download"):
            held.wait(20.0)

    async with following(tmp_path) as (bench, writer):
        store = writer._store
        assert isinstance(store, MemoryStore)
        publish(writer, 2)
        store.hook = hold
        publish(writer, 3)
        await bench.until(lambda: "run-a-v3" in bench.shelf.names)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):  # the client that asked for it goes away
                await bench.watcher.engine_sleeps()
        held.set()
        await bench.until(lambda: bench.ready() == [1, 2, 3])
        assert bench.service.status().error is None


async def test_a_bucket_that_does_not_answer_is_told_of_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "SILENT_S", 0.05)
    held = threading.Event()

    def hang(phase: Literal["before", "after"], call: str, key: str) -> None:
        held.wait(20.0)

    async with following(tmp_path) as (bench, writer):
        store = writer._store
        assert isinstance(store, MemoryStore)
        publish(writer, 2)
        await bench.until(lambda: bench.ready() == [1, 2])
        store.hook = hang
        await bench.until(lambda: "no answer for" in str(bench.service.status().error))
        assert bench.engine.routable == {"run-a-v1", "run-a-v2"}
        store.hook = None
        held.set()
        await bench.until(lambda: bench.service.status().error is None)
        publish(writer, 3)
        await bench.until(lambda: bench.ready() == [1, 2, 3])

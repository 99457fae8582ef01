"""The watcher over a bucket in memory: what becomes ready, in which order, and what goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.layout import file_key, manifest_key
from adapter_bucket.manifest import RunState
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.store import NotModified, StoredObject
from tests.unit.vllm_bucket_lora.bucket import SERVED, adapter_bytes, claim, publish
from tests.unit.vllm_bucket_lora.harness import following, watching

pytestmark = pytest.mark.anyio


class FlakyStore(MemoryStore):
    """Fails every read while ``down``."""

    down = False

    def get(
        self, key: str, *, if_none_match: str | None = None, max_bytes: int | None = None
    ) -> StoredObject | NotModified:
        if self.down:
            raise StoreUnavailable("the network is down")
        return super().get(key, if_none_match=if_none_match, max_bytes=max_bytes)


async def test_a_window_is_loaded_newest_first(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    for version in (1, 2, 3, 4, 5):
        publish(writer, version)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [3, 4, 5])
        assert bench.engine.calls == ["load run-a-v5", "load run-a-v4", "load run-a-v3"]


async def test_the_oldest_version_leaves_when_its_successor_is_ready(tmp_path: Path) -> None:
    async with following(tmp_path, window=2) as (bench, writer):
        for version in (2, 3):
            publish(writer, version)
            await bench.until(lambda v=version: v in bench.ready())  # type: ignore[misc]
        await bench.until(lambda: bench.files() == ["v00000002", "v00000003"])
        calls = bench.engine.calls
        assert calls.index("load run-a-v3") < calls.index("forget run-a-v1")
        assert calls.index("forget run-a-v1") < calls.index("remove run-a-v1")


async def test_files_and_slot_stay_while_a_request_uses_them(tmp_path: Path) -> None:
    async with following(tmp_path, window=1) as (bench, writer):
        bench.engine.in_use["run-a-v1"] = 1
        publish(writer, 2)
        await bench.until(lambda: bench.ready() == [2])
        await asyncio.sleep(0.1)
        assert "v00000001" in bench.files()
        assert "remove run-a-v1" not in bench.engine.calls
        bench.engine.in_use.clear()
        await bench.until(lambda: bench.files() == ["v00000002"])


async def test_a_store_that_fails_leaves_ready_versions_ready(tmp_path: Path) -> None:
    store = FlakyStore()
    writer = claim(store)
    publish(writer, 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1])
        store.down = True
        run = bench.watcher.runs["run-a"]
        await bench.until(lambda: run.fault is not None)
        assert "the network is down" in str(run.fault)
        assert bench.ready() == [1]
        store.down = False
        publish(writer, 2)
        await bench.until(lambda: bench.ready() == [1, 2])
        assert run.fault is None


async def test_corrupt_bytes_are_never_loaded_and_heal_when_the_object_does(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    good = adapter_bytes(2.0)
    publish(writer, 2, good)
    key = file_key("run-a", 2, "adapter_model.safetensors")
    store.overwrite(key, adapter_bytes(9.0))
    async with watching(store, tmp_path) as bench:
        run = await bench.run()
        await bench.until(lambda: bench.ready() == [1] and 2 in run.retries)
        assert "sha256" in run.retries[2].reason
        store.overwrite(key, good)
        await bench.until(lambda: bench.ready() == [1, 2])


async def test_adapters_without_effect_or_with_nan_are_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store, window=3)
    publish(writer, 1, adapter_bytes(0.0))
    publish(writer, 2, adapter_bytes(float("nan")))
    publish(writer, 3)
    async with watching(store, tmp_path) as bench:
        run = await bench.run()
        await bench.until(lambda: bench.ready() == [3] and len(run.refused) == 2)
        assert "zero" in run.refused[1]
        assert "NaN" in run.refused[2]


async def test_what_the_engine_refuses_is_not_tried_again(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    async with watching(store, tmp_path) as bench:
        bench.engine.refuse["run-a-v1"] = "no such module"
        run = await bench.run()
        await bench.until(lambda: run.refused.get(1) == "no such module")
        bench.engine.refuse.clear()
        await asyncio.sleep(0.1)
        assert bench.ready() == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"r": 16, "lora_alpha": 32}, "--max-lora-rank 16"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules"),
    ],
)
async def test_versions_that_cannot_be_served_are_refused_with_the_value_to_change(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    publish(writer, 2, **config)
    async with watching(store, tmp_path) as bench:
        run = await bench.run()
        await bench.until(lambda: bench.ready() == [1])
        assert named in run.refused[2]


async def test_a_run_on_another_base_model_is_refused_as_a_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store, base=BaseModelRef(id="models/other")), 1)
    async with watching(store, tmp_path) as bench:
        run = await bench.run()
        await bench.until(lambda: run.base_fault is not None)
        assert "models/other" in str(run.base_fault)
        assert bench.ready() == []


async def test_a_window_that_does_not_fit_says_which_max_loras_would(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store, window=SERVED.max_loras), 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: "run-a" in bench.watcher.admission.refused)
        assert "--max-loras 9" in bench.watcher.admission.refused["run-a"]
        assert bench.ready() == []


async def test_with_keys_an_unsigned_run_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    monkeypatch.setenv("BUCKET_LORA_SIGNING_KEYS", f"k1:{'ab' * 32}")
    publish(claim(store, "signed"), 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready("signed") == [1])
        run = await bench.run()
        await bench.until(lambda: run.fault is not None)
        assert "IntegrityError" in str(run.fault)
        assert bench.ready() == []
        answer = await bench.service.answer("run-a-v1", 0.0)
        assert answer.adapter is not None
        assert "IntegrityError" in str(answer.adapter.reason)
        assert "IntegrityError" in str(answer.runs["run-a"].error)


async def test_a_finished_run_keeps_its_newest_version(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store, window=2)
    publish(writer, 1)
    publish(writer, 2)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1, 2])
        writer.close(RunState.FINISHED)
        await bench.until(lambda: bench.ready() == [2])


async def test_a_new_run_takes_the_slot_of_a_finished_one(tmp_path: Path) -> None:
    store = MemoryStore()
    old = claim(store, "old", window=3)
    publish(old, 1)
    old.close(RunState.FINISHED)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready("old") == [1])
        publish(claim(store, "new", window=SERVED.max_loras - 1), 1)
        await bench.until(lambda: bench.ready("new") == [1])
        await bench.until(lambda: bench.ready("old") == [])


async def test_a_run_that_starts_right_after_another_ended_is_not_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    old = claim(store, "old", window=SERVED.max_loras - 1)
    publish(old, 1)
    async with watching(store, tmp_path, poll_s=60.0) as bench:  # "old" is not polled again
        await bench.until(lambda: bench.ready("old") == [1])
        old.close(RunState.FINISHED)
        publish(claim(store, "new", window=SERVED.max_loras - 1), 1)
        await bench.until(lambda: "new" in bench.watcher.admission.keep)
        assert bench.watcher.admission.refused == {}


async def test_runs_outside_the_pattern_are_not_followed(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store, "mine-1"), 1)
    publish(claim(store, "theirs-1"), 1)
    async with watching(store, tmp_path, pattern="mine-*") as bench:
        await bench.until(lambda: bench.ready("mine-1") == [1])
        assert set(bench.watcher.runs) == {"mine-1"}


async def test_a_client_that_waits_makes_the_watcher_look_at_once(tmp_path: Path) -> None:
    async with following(tmp_path, poll_s=60.0) as (bench, writer):
        publish(writer, 2)
        await asyncio.sleep(0.1)
        assert bench.ready() == [1]
        with bench.watcher.expecting("run-a"):
            await bench.until(lambda: bench.ready() == [1, 2])


async def test_a_malformed_manifest_is_reported_and_the_last_good_one_stands(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    async with watching(store, tmp_path) as bench:
        await bench.until(lambda: bench.ready() == [1])
        store.overwrite(manifest_key("run-a"), b"{}")
        run = bench.watcher.runs["run-a"]
        await bench.until(lambda: run.fault is not None)
        assert bench.ready() == [1]


async def test_every_refusal_stands_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    publish(claim(store, "strange", base=BaseModelRef(id="models/other")), 1)
    writer = claim(store)
    publish(writer, 1, use_dora=True)
    publish(writer, 2, adapter_bytes(0.0))
    async with watching(store, tmp_path) as bench:
        await bench.run("strange")
        run = await bench.run()
        await bench.until(lambda: set(run.refused) == {1, 2})
        publish(writer, 3)
        await bench.until(lambda: bench.ready() == [3])
        await asyncio.sleep(0.1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for what in ("run strange: ", "run-a-v1 is refused: ", "run-a-v2 is refused: "):
        assert len([text for text in told if text.startswith(what)]) == 1, told

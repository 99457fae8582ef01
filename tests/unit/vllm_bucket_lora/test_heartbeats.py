"""What a server says of itself in the bucket, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from adapter_bucket.errors import StoreDenied
from adapter_bucket.heartbeat import ABANDONED_S, HeartbeatReader
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.status import ReplicaStatus, RunStatus
from adapter_bucket.store import Payload
from vllm_bucket_lora.goodbye import LastWord, Note, note_heartbeats
from vllm_bucket_lora.heartbeats import Heart

pytestmark = pytest.mark.anyio


def status(ready: list[int], state: str = "running") -> ReplicaStatus:
    return ReplicaStatus(
        replica_id="r-1",
        base_model="m",
        dtype="bfloat16",
        max_loras=8,
        max_lora_rank=8,
        ready=[*(f"run-v{v}" for v in ready), "other-v1"],
        runs={"run": RunStatus(state=state, latest=3, window=3, ready=ready)},
    )


class Server:
    """Only a status that tests change."""

    def __init__(self) -> None:
        self.now = status([1])


@asynccontextmanager
async def beating(
    store: MemoryStore,
    server: Server,
    interval_s: float,
    note: Callable[[Iterable[str | None]], None] = lambda alive: None,
) -> AsyncIterator[Heart]:
    with ThreadPoolExecutor(1) as executor:
        heart = Heart(
            store,
            replica_id="r-1",
            url="http://10.0.0.1:8000",
            status=lambda: server.now,
            executor=executor,
            note=note,
            interval_s=interval_s,
            settle_s=0.01,
        )
        task = asyncio.create_task(heart.beat())
        try:
            yield heart
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 30 s")


async def test_a_server_appears_with_what_it_serves_and_leaves_at_its_end() -> None:
    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=60.0):
        await until(lambda: "r-1" in reader.poll())
        beat = reader.poll()["r-1"].heartbeat
        assert beat.url == "http://10.0.0.1:8000"
        assert beat.status.ready == ["run-v1"]
        assert list(beat.status.runs) == ["run"]
    assert reader.poll() == {}


async def test_news_are_written_soon_and_nothing_is_written_without() -> None:
    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=60.0) as heart:
        heart.notice()
        await until(lambda: "r-1" in reader.poll())
        await asyncio.sleep(0.1)
        before = reader.poll()["r-1"].heartbeat.sequence
        heart.notice()
        await asyncio.sleep(0.1)
        assert reader.poll()["r-1"].heartbeat.sequence == before
        server.now = status([1, 2])
        heart.notice()
        await until(lambda: reader.poll()["r-1"].heartbeat.status.runs["run"].ready == [1, 2])
        run = server.now.runs["run"].model_copy(update={"refused": {3: "its probe failed"}})
        server.now = server.now.model_copy(update={"runs": {"run": run}})
        heart.notice()
        await until(lambda: 3 in reader.poll()["r-1"].heartbeat.status.runs["run"].refused)


async def test_it_keeps_beating_without_news() -> None:
    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=0.03):
        await until(lambda: any(s.heartbeat.sequence > 3 for s in reader.poll().values()))


async def test_the_heartbeat_of_an_ended_run_is_taken_back() -> None:
    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=0.03):
        await until(lambda: "r-1" in reader.poll())
        server.now = status([1], state="finished")
        await until(lambda: reader.poll() == {})


async def test_a_server_without_a_run_says_that_it_is_there() -> None:
    store, server = MemoryStore(), Server()
    server.now = status([1]).model_copy(update={"runs": {}, "ready": []})
    reader, of_run = HeartbeatReader(store, None), HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=0.03):
        await until(lambda: "r-1" in reader.poll())
        server.now = status([1])
        await until(lambda: "r-1" in of_run.poll())
        beat = reader.poll()["r-1"].heartbeat
        assert (beat.run_id, beat.status.runs, beat.status.ready) == (None, {}, [])
        server.now = status([1], state="finished")
        await until(lambda: of_run.poll() == {})
        assert "r-1" in reader.poll()
    assert reader.poll() == {}


async def test_a_server_that_starts_removes_what_killed_ones_left_a_day_ago() -> None:
    clock = [1e6]
    store, server = MemoryStore(clock=lambda: clock[0]), Server()
    store.overwrite("replicas/killed.json", b"{}")
    clock[0] += ABANDONED_S - 10
    store.overwrite("replicas/silent.json", b"{}")
    store.overwrite("replicas/notes.txt", b"somebody's own")
    clock[0] += 20
    async with beating(store, server, interval_s=60.0):
        await until(lambda: "replicas/killed.json" not in set(store.list("")))
        kept = {"replicas/silent.json", "replicas/notes.txt", "replicas/r-1.json"}
        assert kept <= set(store.list("replicas/"))


class ReadOnlyStore(MemoryStore):
    writes = 0

    def overwrite(self, key: str, data: Payload) -> str:
        self.writes += 1
        raise StoreDenied("AccessDenied: s3:PutObject")


async def test_a_read_only_bucket_is_asked_once_and_reported() -> None:
    store, server = ReadOnlyStore(), Server()
    async with beating(store, server, interval_s=0.02) as heart:
        await until(lambda: heart.fault is not None)
        await asyncio.sleep(0.1)
        assert store.writes == 1
        assert "s3:PutObject" in str(heart.fault)


async def test_one_refusal_after_others_were_written_silences_nobody() -> None:
    refused: list[str] = []

    def refuse_once(phase: Literal["before", "after"], call: str, key: str) -> None:
        if phase == "before" and call == "overwrite" and not refused:
            refused.append(key)
            raise StoreDenied("403, this once")

    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    async with beating(store, server, interval_s=0.03) as heart:
        await until(lambda: "r-1" in reader.poll())
        store.hook = refuse_once
        await until(lambda: bool(refused))
        sequence = reader.poll()["r-1"].heartbeat.sequence
        await until(lambda: reader.poll()["r-1"].heartbeat.sequence > sequence)
        await until(lambda: heart.fault is None)


async def test_a_full_disk_and_what_nobody_foresaw_end_no_heartbeats(tmp_path: Path) -> None:
    failed: list[str] = []

    def fail_once(phase: Literal["before", "after"], call: str, key: str) -> None:
        if phase == "before" and call == "scan":
            failed.append(key)
            raise RuntimeError("nobody foresaw this")

    store, server = MemoryStore(hook=fail_once), Server()
    reader = HeartbeatReader(store, "run")

    def note(alive: Iterable[str | None]) -> None:  # into a directory that is not there
        runs = list(alive)
        note_heartbeats(tmp_path / "gone", Note(url="memory://", replica_id="r-1", runs=runs))

    async with beating(store, server, interval_s=0.03, note=note):
        await until(lambda: any(s.heartbeat.sequence > 3 for s in reader.poll().values()))
        assert failed
    assert reader.poll() == {}


async def test_what_a_killed_process_left_is_taken_back_from_its_note(tmp_path: Path) -> None:
    store, server = MemoryStore(), Server()
    reader = HeartbeatReader(store, "run")
    port = tmp_path / "port-8000"
    port.mkdir()

    def note(alive: Iterable[str | None]) -> None:
        note_heartbeats(port, Note(url="memory", replica_id="r-1", runs=list(alive)))

    with ThreadPoolExecutor(1) as executor:
        heart = Heart(
            store, replica_id="r-1", url="u", status=lambda: server.now, executor=executor,
            note=note,
        )  # fmt: skip
        await heart.write()  # and is killed: no goodbye
    assert "r-1" in reader.poll()
    LastWord(tmp_path, open_=lambda url: store).say()
    assert reader.poll() == {}
    assert list(store.list("")) == [], "the server's own is gone as well"


async def test_after_a_goodbye_nothing_is_left_to_take_back(tmp_path: Path) -> None:
    store, server, noted = MemoryStore(), Server(), list[Iterable[str | None]]()
    with ThreadPoolExecutor(1) as executor:
        heart = Heart(
            store, replica_id="r-1", url="u", status=lambda: server.now, executor=executor,
            note=noted.append,
        )  # fmt: skip
        task = asyncio.create_task(heart.beat())
        await until(lambda: noted == [{None, "run"}])
        task.cancel()
        await asyncio.wait([task])
    assert noted == [{None, "run"}, set()]


class SlowStore(MemoryStore):
    """Holds a heartbeat back until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.go_on = threading.Event(), threading.Event()

    def overwrite(self, key: str, data: Payload) -> str:
        self.writing.set()
        self.go_on.wait(5)
        return super().overwrite(key, data)


async def test_a_heartbeat_on_its_way_at_the_end_is_taken_back_too() -> None:
    store, server = SlowStore(), Server()
    with ThreadPoolExecutor(1) as executor:
        heart = Heart(
            store, replica_id="r-1", url="u", status=lambda: server.now, executor=executor
        )
        task = asyncio.create_task(heart.beat())
        await until(store.writing.is_set)
        threading.Timer(0.1, store.go_on.set).start()
        task.cancel()
        await asyncio.wait([task])
    assert list(store.list("")) == []

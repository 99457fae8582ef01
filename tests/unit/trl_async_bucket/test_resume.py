"""Which checkpoint a trainer goes on from, what is refused, and what the other ranks learn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.errors import ConfigError, NotPublished, StoreUnavailable
from adapter_bucket.fencing import read_manifest
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.signing import SigningKeys
from tests.adapters import BASE, version
from tests.checkpoints import FACTS, claim, put_checkpoint, read_folder, write_checkpoint
from trl_async_bucket.resume import (
    RESUME,
    RESUME_REQUIRED,
    ResumePoint,
    ResumeRequest,
    asked_for,
    check_still_newest,
    resume_point,
)

RUN = "run-1"


class Group:
    """Ranks as threads of one process, with a real rendezvous at every exchange."""

    def __init__(self, world_size: int, hosts: int = 1) -> None:
        self.world_size = world_size
        self.per_host = world_size // hosts
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)

    def run(self, body: Callable[[Rank], Any]) -> list[Any]:
        """Every rank's result, or error."""

        def one(number: int) -> Any:
            try:
                return body(Rank(self, number))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))


class Rank:
    """One of them."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self.rank = number
        self.local_rank = number % group.per_host
        self.world_size = group.world_size

    def from_first(self, value: Any) -> Any:
        return self.from_all(value)[0]

    def from_all(self, value: Any) -> list[Any]:
        self._group.values[self.rank] = value
        self._group.barrier.wait()
        values = list(self._group.values)
        self._group.barrier.wait()
        return values


def request(output_dir: Path, **changes: Any) -> ResumeRequest:
    given = {"run_id": RUN, "output_dir": output_dir, "required": False, "sharding": "none"}
    return ResumeRequest(**{**given, **changes})


def resume(
    store: MemoryStore,
    output_dir: Path,
    *,
    base_model: BaseModelRef = BASE,
    world_size: int = 1,
    **changes: Any,
) -> ResumePoint | None:
    """As a trainer of one host does it; an error is raised if every rank got it."""
    results = Group(world_size).run(
        lambda rank: resume_point(
            request(output_dir, **changes),
            rank,
            open_bucket=lambda: store,
            base_model=lambda: base_model,
        )
    )
    if isinstance(results[0], Exception):
        assert {str(one) for one in results} == {str(results[0])}
        raise results[0]
    assert results == [results[0]] * world_size
    first: ResumePoint | None = results[0]
    return first


def with_checkpoint(folder: Path, *, step: int = 500, facts: TrainerFacts = FACTS) -> MemoryStore:
    store = MemoryStore()
    write_checkpoint(folder, step)
    writer = claim(store)
    checkpoints = CheckpointWriter(store, writer.ownership, limit=2)
    checkpoints.commit(
        CheckpointUpload(store, RUN, folder, step=step, epoch=1, trainer=facts).run()
    )
    return store


def test_the_words() -> None:
    assert asked_for("bucket", None) == RESUME
    assert asked_for(None, "bucket:required") == RESUME_REQUIRED
    assert asked_for("out/checkpoint-5", "bucket") is None  # the argument wins
    assert asked_for(None, None) is None
    assert asked_for(True, None) is None


def test_the_newest_checkpoint_is_brought_to_the_output_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = with_checkpoint(tmp_path / "made")
    point = resume(store, tmp_path / "out", world_size=2)
    assert point is not None
    assert point.path == tmp_path / "out/checkpoint-500"
    assert read_folder(point.path) == read_folder(tmp_path / "made")
    assert "goes on from checkpoint 500" in caplog.text


def test_every_host_fetches_once(tmp_path: Path) -> None:
    """Two hosts of two ranks, each with a disk of its own."""
    store = with_checkpoint(tmp_path / "made")
    opened: list[int] = []

    def body(rank: Rank) -> Any:
        def open_bucket() -> MemoryStore:
            opened.append(rank.rank)
            return store

        host = tmp_path / f"host-{rank.rank // 2}"
        return resume_point(request(host), rank, open_bucket=open_bucket, base_model=lambda: BASE)

    results = Group(4, hosts=2).run(body)
    assert not [one for one in results if isinstance(one, Exception)]
    assert sorted(opened) == [0, 2]
    for host in (0, 1):
        fetched = tmp_path / f"host-{host}/checkpoint-500"
        assert read_folder(fetched) == read_folder(tmp_path / "made")


def test_an_error_on_another_host_reaches_all_ranks(tmp_path: Path) -> None:
    store = with_checkpoint(tmp_path / "made")

    def body(rank: Rank) -> Any:
        def open_bucket() -> MemoryStore:
            if rank.rank == 1:
                raise StoreUnavailable("host 1 has no network")
            return store

        host = tmp_path / f"host-{rank.rank}"
        return resume_point(request(host), rank, open_bucket=open_bucket, base_model=lambda: BASE)

    for result in Group(2, hosts=2).run(body):
        assert isinstance(result, StoreUnavailable)
        assert "host 1 has no network" in str(result)


def test_a_run_without_a_checkpoint_starts_at_step_0_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    assert resume(store, tmp_path / "out", world_size=2) is None
    assert "there is no runs/run-1/manifest.json. Training starts at step 0" in caplog.text
    writer = claim(store)
    writer.publish(1, **version(1))
    assert resume(store, tmp_path / "out") is None
    assert "names no checkpoint (latest version 1)" in caplog.text


def test_a_required_checkpoint_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotPublished, match=r"no runs/run-1/manifest\.json.*'bucket'"):
        resume(MemoryStore(), tmp_path / "out", required=True, world_size=2)


def test_another_base_model_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    store = with_checkpoint(tmp_path / "made")
    other = BaseModelRef(id="org/other", architecture=BASE.architecture)
    with pytest.raises(ConfigError, match=r"cannot be resumed.*org/model.*bucket_run_id"):
        resume(store, tmp_path / "out", base_model=other, world_size=2)
    assert not (tmp_path / "out").exists()


def test_parts_that_other_ranks_wrote_are_refused(tmp_path: Path) -> None:
    zero = TrainerFacts(world_size=4, sharding="deepspeed")
    store = with_checkpoint(tmp_path / "made", facts=zero)
    with pytest.raises(ConfigError, match="written by 4 ranks with sharding 'deepspeed'"):
        resume(store, tmp_path / "out", sharding="deepspeed", world_size=2)
    with pytest.raises(ConfigError, match="this trainer has 2 with 'none'"):
        resume(store, tmp_path / "out", world_size=2)
    store = with_checkpoint(tmp_path / "made", facts=TrainerFacts(world_size=1, sharding="fsdp"))
    with pytest.raises(ConfigError, match="this trainer has 'none'"):
        resume(store, tmp_path / "out")


def test_other_numbers_of_whole_ranks_go_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = with_checkpoint(tmp_path / "made", facts=TrainerFacts(world_size=8))
    assert resume(store, tmp_path / "out", world_size=2) is not None
    assert "written by 8 ranks, this trainer has 2" in caplog.text


def test_a_trainer_that_was_still_alive_is_noticed_after_the_claim(tmp_path: Path) -> None:
    store = with_checkpoint(tmp_path / "made")
    point = resume(store, tmp_path / "out")
    assert point is not None
    found = read_manifest(store, RUN, SigningKeys())
    assert found is not None
    check_still_newest(found.manifest, point)
    alive = claim(store)
    put_checkpoint(store, alive, tmp_path / "made", 600)
    with pytest.raises(StoreUnavailable, match=r"checkpoint 600 became its newest.*start this"):
        check_still_newest(alive.manifest, point)

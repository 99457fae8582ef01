"""Which checkpoint a trainer goes on from, what is refused, and what the other ranks learn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.errors import BucketError, ConfigError, NotPublished, StoreUnavailable
from adapter_bucket.fencing import read_manifest
from adapter_bucket.layout import checkpoint_file_key, checkpoint_index_key
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.adapters import BASE, version
from tests.checkpoints import FACTS, claim, put_checkpoint, read_folder, write_checkpoint
from tests.unit.trl_async_bucket.rank_processes import as_ranks
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


def request(output_dir: Path, **changes: Any) -> ResumeRequest:
    given = {"run_id": RUN, "output_dir": output_dir, "required": False, "sharding": "none"}
    return ResumeRequest(**{**given, **changes})


def resume(
    store: Store, output_dir: Path, *, base_model: BaseModelRef = BASE, **changes: Any
) -> ResumePoint | None:
    """As a trainer of one process does it."""
    return resume_point(
        request(output_dir, **changes), open_bucket=lambda: store, base_model=lambda: base_model
    )


def with_checkpoint(
    folder: Path, *, step: int = 500, facts: TrainerFacts = FACTS, store: Store | None = None
) -> Store:
    store = store or MemoryStore()
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
    point = resume(store, tmp_path / "out")
    assert point is not None
    assert point.path == tmp_path / "out/checkpoint-500"
    assert read_folder(point.path) == read_folder(tmp_path / "made")
    assert "goes on from checkpoint 500" in caplog.text


def resume_on_hosts_of(ranks_per_host: int, bucket: str, folder: Path, no_network: int) -> Any:
    """One rank among several: where it goes on from, or its error; how often it used the bucket."""
    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % ranks_per_host)
    opened = 0

    def open_bucket() -> Store:
        nonlocal opened
        opened += 1
        if rank == no_network:
            raise StoreUnavailable(f"rank {rank} has no network")
        return open_store(bucket)

    wanted = request(folder / f"host-{rank // ranks_per_host}")
    try:
        point = resume_point(wanted, open_bucket=open_bucket, base_model=lambda: BASE)
    except BucketError as error:
        return f"{type(error).__name__}: {error}", opened
    return point.entry.step if point is not None else None, opened


def test_every_host_fetches_once(tmp_path: Path) -> None:
    """Two hosts of two ranks, each host with a disk of its own."""
    bucket = (tmp_path / "bucket").as_uri()
    with_checkpoint(tmp_path / "made", store=open_store(bucket))
    results = as_ranks(4, resume_on_hosts_of, 2, bucket, tmp_path, -1)
    assert results == [(500, 1), (500, 0), (500, 1), (500, 0)]
    for host in (0, 1):
        fetched = tmp_path / f"host-{host}/checkpoint-500"
        assert read_folder(fetched) == read_folder(tmp_path / "made")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_host_reaches_all_ranks(tmp_path: Path, failing: int) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    with_checkpoint(tmp_path / "made", store=open_store(bucket))
    results = as_ranks(2, resume_on_hosts_of, 1, bucket, tmp_path, failing)
    own, other = results[failing][0], results[1 - failing][0]
    assert own == f"StoreUnavailable: rank {failing} has no network"
    assert other.startswith("RankFailed: ")
    assert other.endswith(f"rank {failing} failed: {own}")


def test_a_run_without_a_checkpoint_starts_at_step_0_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    assert resume(store, tmp_path / "out") is None
    assert "there is no runs/run-1/manifest.json. Training starts at step 0" in caplog.text
    writer = claim(store)
    writer.publish(1, **version(1))
    assert resume(store, tmp_path / "out") is None
    assert "names no checkpoint (latest version 1)" in caplog.text


def test_a_required_checkpoint_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotPublished, match=r"no runs/run-1/manifest\.json.*'bucket'"):
        resume(MemoryStore(), tmp_path / "out", required=True)


def test_another_base_model_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    store = with_checkpoint(tmp_path / "made")
    other = BaseModelRef(id="org/other", architecture=BASE.architecture)
    with pytest.raises(ConfigError, match=r"cannot be resumed.*org/model.*bucket_run_id"):
        resume(store, tmp_path / "out", base_model=other)
    assert not (tmp_path / "out").exists()


def test_parts_that_other_ranks_wrote_are_refused(tmp_path: Path) -> None:
    zero = TrainerFacts(world_size=4, sharding="deepspeed")
    store = with_checkpoint(tmp_path / "made", facts=zero)
    with pytest.raises(ConfigError, match="written by 4 ranks with sharding 'deepspeed'"):
        resume(store, tmp_path / "out", sharding="deepspeed")
    with pytest.raises(ConfigError, match="this trainer has 1 with 'none'"):
        resume(store, tmp_path / "out")
    store = with_checkpoint(tmp_path / "made", facts=TrainerFacts(world_size=1, sharding="fsdp"))
    with pytest.raises(ConfigError, match="this trainer has 'none'"):
        resume(store, tmp_path / "out")


def test_other_numbers_of_whole_ranks_go_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = with_checkpoint(tmp_path / "made", facts=TrainerFacts(world_size=8))
    assert resume(store, tmp_path / "out") is not None
    assert "written by 8 ranks, this trainer has 1" in caplog.text


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("damaged", ["index", "file"])
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_newest_checkpoint_that_is_damaged_is_passed_over(
    tmp_path: Path, damaged: str, sharding: str, lost: bool
) -> None:
    """The one before it must fit as well: the run may have been started in another way then."""
    before = TrainerFacts(world_size=1, sharding=sharding)
    store = with_checkpoint(tmp_path / "older", step=500, facts=before)
    writer = claim(store)
    write_checkpoint(tmp_path / "newer", 600)
    newest = put_checkpoint(store, writer, tmp_path / "newer", 600)
    place = (RUN, newest.step, newest.epoch)
    key = (
        checkpoint_index_key(*place)
        if damaged == "index"
        else checkpoint_file_key(*place, "optimizer.pt")
    )
    if lost:
        store.delete([key])
    else:
        store.overwrite(key, 200 * b"x")
    if sharding == "fsdp":
        with pytest.raises(ConfigError, match="this trainer has 'none'"):
            resume(store, tmp_path / "out")
        return
    point = resume(store, tmp_path / "out")
    assert point is not None
    assert point.entry.step == 500
    assert read_folder(point.path) == read_folder(tmp_path / "older")
    check_still_newest(claim(store).manifest, point)


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

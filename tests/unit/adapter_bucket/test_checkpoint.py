"""The index of a checkpoint: what is refused before anything is written to a disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.checkpoint import (
    CHECKPOINT_FORMAT,
    MAX_INDEX_BYTES,
    CheckpointFile,
    CheckpointIndex,
    TrainerFacts,
    check_names,
    decode_index,
    encode_index,
    entry_of,
)
from adapter_bucket.checkpoint_fetch import fetch_checkpoint, fetch_newest
from adapter_bucket.checkpoint_upload import files_below
from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.layout import (
    check_checkpoint_file,
    checkpoint_file_key,
    checkpoint_index_key,
    parse_checkpoint_key,
)
from adapter_bucket.manifest import CheckpointEntry, FileEntry
from adapter_bucket.memory_store import MemoryStore
from tests.checkpoints import claim, put_checkpoint, write_checkpoint

HOSTILE = [
    "../x", "a/../../x", "..", ".", "/etc/passwd", "a//b", "a/", "", "C:\\x", "C:x", "a\\b", "a\0b",
    "a b", "a\nb", "é", "a/./b", ".tmp-1", "x.lock", "a/b/c/d/e/f/g", "x" * 129, "trailing.", "%2e",
    "~/.ssh/id", "a/…",
]  # fmt: skip


def index(**changes: Any) -> CheckpointIndex:
    file = CheckpointFile(size=3, sha256="0" * 64)
    given = {
        "format_version": CHECKPOINT_FORMAT,
        "run_id": "r",
        "step": 5,
        "epoch": 2,
        "trainer": TrainerFacts(world_size=1),
        "files": {"optimizer.pt": file},
    }
    return CheckpointIndex(**{**given, **changes})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_could_leave_its_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be stored"):
        check_checkpoint_file(name)


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt", "rng_state_0.pth", "pytorch_model_fsdp_0/.metadata", "latest",
        "pytorch_model_fsdp_0/__0_0.distcp",
        "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)  # fmt: skip
def test_what_trainers_write_is_taken(name: str) -> None:
    assert check_checkpoint_file(name) == name


@given(name=st.text(max_size=40))
def test_no_accepted_name_leaves_its_directory(name: str) -> None:
    try:
        check_checkpoint_file(name)
    except ConfigError:
        return
    path = os.path.normpath(os.path.join("/stage", name))
    assert path == f"/stage/{name}"


def test_names_that_meet_on_some_file_system_are_refused() -> None:
    with pytest.raises(ConfigError, match="upper and lower case"):
        check_names(["A/x", "a/X"])
    with pytest.raises(ConfigError, match="directory of another"):
        check_names(["a", "A/x"])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_writes_nothing(name: str, tmp_path: Path) -> None:
    """With a manifest that vouches for it: an attacker who can write to an unsigned bucket."""
    document = json.loads(encode_index(index()))
    document["files"] = {name: document["files"]["optimizer.pt"]}
    data = json.dumps(document).encode()
    store = MemoryStore()
    store.create(checkpoint_index_key("r", 5, 2), data)
    entry = entry_of(index(), data, created_at=0.0)
    with pytest.raises(IntegrityError, match="not valid"):
        fetch_checkpoint(store, "r", entry, tmp_path / "out")
    assert list(tmp_path.rglob("*")) == []


def test_an_index_is_read_strictly() -> None:
    good = index()
    data = encode_index(good)
    entry = entry_of(good, data, created_at=1.0)
    assert decode_index(data, run_id="r", entry=entry) == good

    def refused(data: bytes, run_id: str = "r", **changes: Any) -> str:
        entry = CheckpointEntry.model_validate(
            {**entry_of(good, data, created_at=1.0).model_dump(), **changes}
        )
        with pytest.raises(IntegrityError) as error:
            decode_index(data, run_id=run_id, entry=entry)
        return str(error.value)

    with pytest.raises(IntegrityError, match="not the one that the manifest names"):
        decode_index(data + b" ", run_id="r", entry=entry)
    assert "another checkpoint" in refused(data, run_id="other")
    assert "another checkpoint" in refused(data, step=6)
    assert "another checkpoint" in refused(data, epoch=3)
    assert "bytes, the manifest says" in refused(data, size=4)
    assert "format_version 2" in refused(
        data.replace(b'"format_version": 1', b'"format_version": 2')
    )
    assert "not valid" in refused(b"[]")
    assert "not valid" in refused(data.replace(b'"size": 3', b'"size": -3'))
    assert "not valid" in refused(data.replace(b'"size": 3', b'"size": "3"'))


def test_an_index_too_large_to_read_is_not_written() -> None:
    file = CheckpointFile(size=1, sha256="0" * 64)
    many = {f"{'d' * 120}/{'e' * 120}/{number}": file for number in range(16_000)}
    with pytest.raises(ConfigError, match=f"the limit is {MAX_INDEX_BYTES}"):
        encode_index(index(files=many))


def test_keys_and_their_way_back() -> None:
    key = checkpoint_file_key("r", 500, 2, "shards/.metadata")
    assert key == "runs/r/checkpoints/checkpoint-500/e2/shards/.metadata"
    assert checkpoint_index_key("r", 500, 2) == "runs/r/checkpoints/checkpoint-500/e2.json"
    assert parse_checkpoint_key(key) == ("r", 500, 2)
    assert parse_checkpoint_key(checkpoint_index_key("r", 500, 2)) == ("r", 500, 2)
    for other in (
        "runs/r/checkpoints/checkpoint-5/e2.jsonx", "runs/r/checkpoints/checkpoint-05/e2/x",
        "runs/r/checkpoints/checkpoint-5/e0/x", "runs/../checkpoints/checkpoint-5/e2/x",
        "runs/r/adapters/v00000001/adapter_config.json",
    ):  # fmt: skip
        assert parse_checkpoint_key(other) is None
    with pytest.raises(ConfigError, match="step -1"):
        checkpoint_index_key("r", -1, 2)


def test_a_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", 1)
    (tmp_path / "made" / "outside").symlink_to("/etc")
    with pytest.raises(ConfigError, match="outside is a link"):
        files_below(tmp_path / "made")
    with pytest.raises(ConfigError, match="holds no files"):
        files_below(tmp_path / "nothing")


def test_a_full_disk_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    write_checkpoint(tmp_path / "made", 1)
    put_checkpoint(store, claim(store), tmp_path / "made", 1)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(ConfigError, match="has room for 10"):
        fetch_newest(store, "run-1", tmp_path / "out")


def test_an_entry_needs_a_digest() -> None:
    with pytest.raises(ValueError, match="sha256"):
        CheckpointEntry(
            step=1, epoch=1, created_at=0.0, size=1, index=FileEntry(size=1, sha256="x")
        )

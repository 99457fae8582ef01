"""Copies of an engine that does not share the API server's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.errors import BucketError, ConfigError, IntegrityError, NotPublished
from adapter_bucket.layout import WEIGHTS_FILE, file_key
from adapter_bucket.memory_store import MemoryStore
from tests.unit.vllm_bucket_lora.bucket import adapter_bytes, claim, publish
from vllm_bucket_lora.remote import OwnCopies, is_elsewhere

SESSION = "/dev/shm/bucket-lora-own"


@pytest.mark.parametrize(
    ("path", "elsewhere"),
    [
        (f"{SESSION}/port-8000/adapters/run/v00000012", False),
        ("/dev/shm/bucket-lora-other/port-8000/adapters/run/v00000012", True),
        ("/mnt/cache/bucket-lora-x1/port-8000/adapters/run/v00000012", True),
        (f"{SESSION}-2/port-8000/adapters/run/v00000012", True),
        ("/models/my-adapter", False),
        ("/dev/shm/bucket-lora-other/adapters/run/v00000012", False),
        ("org/some-adapter", False),
    ],
)
def test_only_directories_of_servers_on_other_machines_are_looked_up(
    path: str, elsewhere: bool
) -> None:
    assert is_elsewhere(path, SESSION) is elsewhere


def test_a_copy_has_the_published_bytes_and_goes_when_the_adapter_does(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    copies = OwnCopies(tmp_path, lambda: store)
    path = copies.path("run-a-v1")
    assert path.is_relative_to(tmp_path)
    assert (path / WEIGHTS_FILE).read_bytes() == adapter_bytes(1.0)
    store.delete([file_key("run-a", 1, WEIGHTS_FILE)])
    assert copies.path("run-a-v1") == path, "fetched once"
    copies.forget("run-a-v1")
    assert not path.exists()
    copies.forget("run-a-v1")


def test_a_copy_of_what_was_published_later_is_found(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    copies = OwnCopies(tmp_path, lambda: store)
    with pytest.raises(NotPublished, match="version 2 of run 'run-a'"):
        copies.path("run-a-v2")
    publish(writer, 2)
    assert copies.path("run-a-v2").is_dir()


def test_other_bytes_than_the_manifest_promises_are_no_copy(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(claim(store), 1)
    store.overwrite(file_key("run-a", 1, WEIGHTS_FILE), adapter_bytes(9.0))
    with pytest.raises(IntegrityError):
        OwnCopies(tmp_path, lambda: store).path("run-a-v1")


def test_a_name_that_is_no_versions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.\./evil'"):
        OwnCopies(tmp_path, MemoryStore).path("../evil")
    with pytest.raises(BucketError):
        OwnCopies(tmp_path, MemoryStore).path("../evil-v1")

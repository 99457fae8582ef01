"""Versions on local disk: fetched once, checked, deleted only when nobody needs them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from adapter_bucket.errors import IntegrityError
from adapter_bucket.layout import file_key
from adapter_bucket.memory_store import MemoryStore
from tests.unit.vllm_bucket_lora.bucket import adapter_bytes, claim, publish
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.ports import LoadRefused


class CountingStore(MemoryStore):
    downloads = 0

    def download(self, key: str, path: Path, *, size: int) -> None:
        self.downloads += 1
        super().download(key, path, size=size)


def test_processes_that_fetch_at_once_share_one_download(tmp_path: Path) -> None:
    store = CountingStore()
    writer = claim(store)
    publish(writer, 1)
    entry = writer.manifest.versions[0]
    with ThreadPoolExecutor(8) as pool:
        caches = [VersionCache(store, tmp_path) for _ in range(8)]
        paths = set(pool.map(lambda cache: cache.fetch("run-a", entry), caches))
    assert len(paths) == 1
    assert store.downloads == 1


def test_a_version_is_not_fetched_while_another_process_decides_about_it(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    cache = VersionCache(store, tmp_path)
    path = cache.fetch("run-a", writer.manifest.versions[0])
    other = VersionCache(store, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        with cache.turn("run-a", 1) as delete:
            fetched = pool.submit(other.fetch, "run-a", writer.manifest.versions[0])
            delete()
            assert wait([fetched], timeout=0.1).not_done
            assert not path.exists()
        assert fetched.result(timeout=30) == path
    assert path.is_dir()
    cache.remove("run-a", 1)
    assert not path.exists()


def test_wrong_bytes_leave_nothing_behind(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1)
    store.overwrite(file_key("run-a", 1, "adapter_model.safetensors"), adapter_bytes(5.0))
    with pytest.raises(IntegrityError):
        VersionCache(store, tmp_path).fetch("run-a", writer.manifest.versions[0])
    assert list(tmp_path.glob("adapters/*/*")) == []


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (b"not a safetensors file at all", "safetensors"),
        (adapter_bytes(1.0)[:-4], "lora_B|bytes"),
        (adapter_bytes(0.0), "zero"),
        (adapter_bytes(float("inf")), "infinity"),
        (adapter_bytes(1.0, rank=3), "rank"),
        (adapter_bytes(1.0, module="layers.0.v_proj"), "target_modules"),
    ],
)
def test_what_is_no_adapter_is_refused_though_its_digest_is_right(
    tmp_path: Path, weights: bytes, said: str
) -> None:
    store = MemoryStore()
    writer = claim(store)
    publish(writer, 1, weights)
    with pytest.raises(LoadRefused, match=said):
        VersionCache(store, tmp_path).fetch("run-a", writer.manifest.versions[0])

"""What holds for a folder as a bucket alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.file_store import FileStore

CALLS: dict[str, Callable[[FileStore], object]] = {
    "get": lambda store: store.get("runs/a/manifest.json"),
    "download": lambda store: store.download("runs/a/w", Path("nowhere"), size=1),
    "create": lambda store: store.create("runs/a/manifest.json", b"{}"),
    "overwrite": lambda store: store.overwrite("runs/a/manifest.json", b"{}"),
    "replace": lambda store: store.replace("runs/a/manifest.json", b"{}", etag="x"),
    "list": lambda store: list(store.list("runs/")),
    "scan": lambda store: list(store.scan("runs/")),
    "list_dirs": lambda store: list(store.list_dirs("runs/")),
    "delete": lambda store: store.delete(["runs/a/manifest.json"]),
    "now": lambda store: store.now(),
    "sweep": lambda store: store.sweep("runs/", older_than_s=0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_folder_that_is_gone_is_a_store_that_is_away(tmp_path: Path, call: str) -> None:
    """Not an empty bucket, whose runs were all deleted; and nobody makes it anew."""
    root = tmp_path / "mount"
    store = FileStore.open(root.as_uri())
    root.rmdir()
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        CALLS[call](store)
    assert not root.exists()
    root.mkdir()
    store.create("runs/a/manifest.json", b"{}")
    assert list(store.list("runs/")) == ["runs/a/manifest.json"]


@pytest.mark.parametrize("call", ["list", "scan", "sweep"])
def test_a_directory_that_cannot_be_read_is_no_empty_one(tmp_path: Path, call: str) -> None:
    """A loop of links stands for an input/output error of a mount."""
    store = FileStore.open((tmp_path / "bucket").as_uri())
    store.create("runs/a/manifest.json", b"{}")
    loop = tmp_path / "bucket" / "runs" / "a" / "replicas"
    loop.symlink_to(loop)
    lookups: dict[str, Callable[[], object]] = {
        "list": lambda: list(store.list("runs/a/replicas/")),
        "scan": lambda: list(store.scan("runs/a/replicas/")),
        "sweep": lambda: store.sweep("runs/a/replicas/", older_than_s=0.0),
    }
    with pytest.raises(StoreUnavailable, match="runs/a/replicas"):
        lookups[call]()
    loop.unlink()
    assert not lookups[call]()

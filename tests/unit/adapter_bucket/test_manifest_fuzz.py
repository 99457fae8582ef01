"""Documents from a bucket that somebody else can write: bounded, refused, never followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.errors import BucketError, ConfigError, IntegrityError
from adapter_bucket.fetch import RunReader, discover_runs, fetch_version
from adapter_bucket.heartbeat import HeartbeatReader, decode_heartbeat
from adapter_bucket.layout import manifest_key
from adapter_bucket.manifest import MAX_MANIFEST_BYTES, decode, encode
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from tests.adapters import BASE, version

RUN = "run-1"


def published() -> tuple[MemoryStore, RunWriter]:
    store = MemoryStore()
    writer = RunWriter.claim(store, RUN, base_model=BASE, window=2, writer_id="w")
    writer.publish(1, **version(1))
    return store, writer


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(published()[1].manifest))
    return found


def decoded(changed: dict[str, Any]) -> Any:
    return decode(json.dumps(changed).encode(), run_id=RUN)


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_an_integrity_error(data: bytes) -> None:
    for call in (
        lambda: decode(data, run_id=RUN),
        lambda: decode_heartbeat(data, run_id=RUN, replica_id="a"),
    ):
        with pytest.raises(IntegrityError):
            call()


junk = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "../../etc", "/abs", "a\0b", "x" * 5000, "💥", 10**400, [], {}, [[]]])
)


@given(
    path=st.sampled_from(
        [
            ("format_version",), ("run_id",), ("state",), ("window",), ("latest",), ("versions",),
            ("writer", "epoch"), ("writer", "id"), ("base_model", "id"),
            ("versions", 0, "version"), ("versions", 0, "files"), ("versions", 0, "step"),
            ("versions", 0, "rank"), ("versions", 0, "created_at"),
            ("versions", 0, "adapter_config"), ("versions", 0, "kind"),
            ("versions", 0, "files", "adapter_model.safetensors", "size"),
            ("versions", 0, "files", "adapter_model.safetensors", "sha256"),
            ("versions", 0, "files", "../../../evil"),
        ]
    ),
    value=junk,
)  # fmt: skip
def test_one_field_of_junk_is_refused_or_harmless(
    path: tuple[Any, ...], value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store, _ = published()
    changed = document()
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    store.overwrite(manifest_key(RUN), json.dumps(changed).encode())
    folder = tmp_path_factory.mktemp("cache")
    reader = RunReader(store, RUN)
    try:
        manifest = reader.poll()
        assert manifest is not None
        for entry in manifest.versions:
            fetch_version(store, RUN, entry, folder / "cache")
    except BucketError:
        pass  # refused, by name
    assert {path.name for path in folder.iterdir()} <= {"cache"}
    for file in folder.rglob("*"):
        assert file.name in {"cache", RUN, "v00000001", "adapter_config.json",
                             "adapter_model.safetensors"}  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"format_version":1,"x":' + b"9" * 1_000_000 + b"}",
        b'{"format_version":' + b"9" * 1_000_000 + b"}",
        b'{"format_version":1,"x":1e999999999}',
        b'{"format_version":1,"x":"' + b"\\u0000" * 170_000 + b'"}',
        b'{"format_version":1,"x":[' + b"[]," * 345_000 + b"[]]}",
        b"{" + b",".join(b'"%d":{}' % number for number in range(90_000)) + b"}",
        b"x" * (MAX_MANIFEST_BYTES + 1),
    ],
    ids=["deep list", "deep object", "huge extra int", "huge version", "huge float", "long text",
         "many lists", "many keys", "too long"],
)  # fmt: skip
def test_hostile_documents_cost_bounded_memory(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "document").write_bytes(data)
    script = """
        import resource, sys
        from pathlib import Path
        from adapter_bucket.errors import IntegrityError
        from adapter_bucket.heartbeat import decode_heartbeat
        from adapter_bucket.manifest import decode

        data = Path(sys.argv[1]).read_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
        for call in (
            lambda: decode(data, run_id="r"),
            lambda: decode_heartbeat(data, run_id="r", replica_id="a"),
        ):
            try:
                call()
            except IntegrityError as error:
                assert len(str(error)) < 1000
            else:
                raise SystemExit("accepted")
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "document"), str(1 << 30)],
        check=True,
        timeout=60,
    )


def test_hostile_names_are_passed_over(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in ("..", ".hidden", "a b", "a\0b", "-x", "x" * 300, "%2e%2e"):
        store.create(f"runs/{name}/manifest.json", b"{}")
        store.create(f"runs/{RUN}/replicas/{name}.json", b"{}")
    assert discover_runs(store) == [RUN]  # that of the heartbeats
    assert HeartbeatReader(store, RUN).poll() == {}
    for name in ("..", "/etc", "a/b", "a\0b", "a\n", "é", ""):
        with pytest.raises(ConfigError):
            RunReader(store, name)
        with pytest.raises(ConfigError):
            fetch_version(store, name, published()[1].manifest.versions[0], tmp_path)
    assert os.listdir(tmp_path) == []


def test_unknown_optional_fields_are_kept_on_rewrite() -> None:
    store, writer = published()
    changed = document()
    changed["added_later"] = {"deep": [1, 2.5, None]}
    changed["versions"][0]["added_later"] = "kept"
    changed["writer"]["added_later"] = True
    store.overwrite(manifest_key(RUN), json.dumps(changed).encode())
    heir = RunWriter.claim(store, RUN, base_model=BASE, window=2, writer_id="heir", takeover=True)
    heir.publish(2, **version(2))
    after = json.loads(store.get(manifest_key(RUN)).data)  # type: ignore[union-attr]
    assert after["added_later"] == {"deep": [1, 2.5, None]}
    assert after["versions"][0]["added_later"] == "kept"
    assert writer.manifest.writer.epoch == 1


def test_another_major_version_is_refused_before_anything_else_is_read() -> None:
    with pytest.raises(IntegrityError, match="format_version 2"):
        decode(b'{"format_version": 2, "all": "different"}', run_id=RUN)


def test_a_version_of_an_unknown_kind_is_read_but_not_loaded(tmp_path: Path) -> None:
    changed = document()
    changed["versions"][0]["kind"] = "full-delta"
    changed["versions"][0]["files"] = {"../../x": {"size": 1, "sha256": "0" * 64}}
    entry = decoded(changed).versions[0]
    with pytest.raises(IntegrityError, match="full-delta"):
        fetch_version(published()[0], RUN, entry, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_manifest_of_another_run_is_refused() -> None:
    with pytest.raises(IntegrityError, match="belongs to"):
        decoded({**document(), "run_id": "other"})


def test_a_manifest_that_grew_too_large_is_not_written() -> None:
    _, writer = published()
    entry = writer.manifest.versions[0]
    many = [entry.model_copy(update={"version": number}) for number in range(1, 6000)]
    manifest = writer.manifest.model_copy(update={"versions": many, "latest": 5999})
    with pytest.raises(ConfigError, match="keep fewer"):
        encode(manifest)


def test_a_version_above_the_readers_limit_is_not_fetched(tmp_path: Path) -> None:
    store, writer = published()
    with pytest.raises(IntegrityError, match="limit is 10"):
        fetch_version(store, RUN, writer.manifest.versions[0], tmp_path, max_bytes=10)

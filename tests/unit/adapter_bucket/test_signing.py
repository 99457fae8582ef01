"""The signature of the manifest: who is believed, rotation, and that nothing can be changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.fetch import RunReader
from adapter_bucket.layout import manifest_key
from adapter_bucket.manifest import decode, encode
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.publish import RunWriter
from adapter_bucket.signing import KEYS_VARIABLE, SigningKeys
from adapter_bucket.store import StoredObject
from tests.adapters import BASE, version

OLD = SigningKeys.parse("old:" + "0a" * 32)
NEW = SigningKeys.parse("new:" + "0b" * 32)
BOTH = SigningKeys.parse("old:" + "0a" * 32 + ",new:" + "0b" * 32)
NONE = SigningKeys()


def signed(keys: SigningKeys) -> tuple[MemoryStore, bytes]:
    store = MemoryStore()
    writer = RunWriter.claim(store, "r", base_model=BASE, window=2, writer_id="w", signing=keys)
    writer.publish(1, **version(1))
    found = store.get(manifest_key("r"))
    assert isinstance(found, StoredObject)
    return store, found.data


def test_a_signed_manifest_is_believed_by_whoever_knows_the_key() -> None:
    store, _ = signed(OLD)
    for keys in (OLD, BOTH, NONE):
        manifest = RunReader(store, "r", signing=keys).poll()
        assert manifest is not None
        assert manifest.signature is not None
        assert manifest.signature.key_id == "old"


def test_an_unsigned_manifest_is_refused_where_a_key_is_set() -> None:
    store, _ = signed(NONE)
    with pytest.raises(IntegrityError, match="not signed"):
        RunReader(store, "r", signing=OLD).poll()


def test_a_manifest_signed_with_another_key_is_refused() -> None:
    store, data = signed(NEW)
    with pytest.raises(IntegrityError, match="'new'"):
        RunReader(store, "r", signing=OLD).poll()
    impostor = SigningKeys.parse("new:" + "0c" * 32)
    with pytest.raises(IntegrityError, match="does not match"):
        decode(data, run_id="r", signing=impostor)


def test_keys_rotate_without_a_gap() -> None:
    store, _ = signed(OLD)
    rotated = SigningKeys.parse("new:" + "0b" * 32 + ",old:" + "0a" * 32)
    follower = RunReader(store, "r", signing=BOTH)
    follower.poll()
    heir = RunWriter.claim(
        store, "r", base_model=BASE, window=2, writer_id="w2", takeover=True, signing=rotated
    )
    heir.publish(2, **version(2))
    manifest = follower.poll()
    assert manifest is not None
    assert manifest.signature is not None
    assert manifest.signature.key_id == "new"


_, DOCUMENT = signed(OLD)


@given(at=st.integers(0, len(DOCUMENT) - 1), value=st.integers(0, 255))
def test_no_byte_can_be_changed(at: int, value: int) -> None:
    changed = bytearray(DOCUMENT)
    changed[at] = value
    if bytes(changed) == DOCUMENT:
        return
    with pytest.raises(IntegrityError):
        decode(bytes(changed), run_id="r", signing=OLD)


def test_the_signature_cannot_be_moved_to_another_field() -> None:
    document = json.loads(DOCUMENT)
    digits = document["signature"]["hmac_sha256"]
    document["extra"] = digits
    with pytest.raises(IntegrityError):
        decode(json.dumps(document, indent=1).encode(), run_id="r", signing=OLD)


def test_a_zero_digest_in_the_manifest_does_not_confuse_the_signature() -> None:
    manifest = decode(DOCUMENT, run_id="r")
    extra = manifest.model_copy(
        update={"writer": manifest.writer.model_copy(update={"id": "0" * 64})}
    )
    assert decode(encode(extra, signing=OLD), run_id="r", signing=OLD).writer.id == "0" * 64


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "k1:" + "0f" * 16)
    assert SigningKeys.from_env().signing_id == "k1"
    monkeypatch.delenv(KEYS_VARIABLE)
    assert not SigningKeys.from_env()


@pytest.mark.parametrize("text", ["k", "k:zz", "k:00", ":" + "00" * 16, "a b:" + "00" * 16,
                                  "k:" + "00" * 16 + ",k:" + "01" * 16])  # fmt: skip
def test_malformed_keys_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SigningKeys.parse(text)
    assert "0000" not in str(caught.value)
    assert "0a0a" not in repr(OLD)

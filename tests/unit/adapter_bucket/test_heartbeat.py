"""Heartbeats: written by one, read by many, judged alive by change and not by clocks."""

from __future__ import annotations

import pytest

from adapter_bucket.errors import IntegrityError
from adapter_bucket.heartbeat import (
    MAX_HEARTBEAT_BYTES,
    Heartbeat,
    HeartbeatReader,
    decode_heartbeat,
    encode_heartbeat,
    remove_heartbeat,
    write_heartbeat,
)
from adapter_bucket.layout import heartbeat_key
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.status import ReplicaStatus


def heartbeat(replica_id: str = "a", sequence: int = 0) -> Heartbeat:
    status = ReplicaStatus(
        replica_id=replica_id, base_model="m", dtype="bfloat16", max_loras=4, max_lora_rank=8
    )
    return Heartbeat(
        run_id="r",
        replica_id=replica_id,
        url="https://10.0.0.1:8000",
        sequence=sequence,
        interval_s=5,
        written_at=1e9,  # decades off: no clock of the replica is compared
        status=status,
    )


def test_a_replica_is_alive_while_its_heartbeat_changes() -> None:
    store, now = MemoryStore(), [100.0]
    reader = HeartbeatReader(store, "r", clock=lambda: now[0])
    write_heartbeat(store, heartbeat(sequence=1))
    assert reader.poll()["a"].alive
    now[0] += 15.0
    assert reader.poll()["a"].alive  # three intervals
    now[0] += 0.1
    assert not reader.poll()["a"].alive
    write_heartbeat(store, heartbeat(sequence=2))
    assert reader.poll()["a"].alive


def test_a_replica_that_leaves_is_forgotten() -> None:
    store = MemoryStore()
    reader = HeartbeatReader(store, "r")
    write_heartbeat(store, heartbeat("a"))
    write_heartbeat(store, heartbeat("b"))
    assert set(reader.poll()) == {"a", "b"}
    remove_heartbeat(store, "r", "a")
    assert set(reader.poll()) == {"b"}


def test_one_bad_heartbeat_hides_no_other() -> None:
    store = MemoryStore()
    write_heartbeat(store, heartbeat("good"))
    store.overwrite(heartbeat_key("r", "bad"), b"{")
    store.overwrite(heartbeat_key("r", "huge"), b"x" * (MAX_HEARTBEAT_BYTES + 1))
    store.overwrite(heartbeat_key("r", "liar"), encode_heartbeat(heartbeat("good")))
    reader = HeartbeatReader(store, "r")
    assert set(reader.poll()) == {"good"}
    assert set(reader.faults) == {"bad", "huge", "liar"}


def test_a_heartbeat_survives_the_round_trip() -> None:
    sent = heartbeat()
    assert decode_heartbeat(encode_heartbeat(sent), run_id="r", replica_id="a") == sent
    with pytest.raises(IntegrityError, match="format_version"):
        decode_heartbeat(
            encode_heartbeat(sent.model_copy(update={"format_version": 2})),
            run_id="r",
            replica_id="a",
        )

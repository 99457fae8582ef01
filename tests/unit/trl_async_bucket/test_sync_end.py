"""How a run ends: finished, interrupted, or with the bucket away."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from tests.unit.trl_async_bucket.models import (
    StatusServer,
    tiny_peft_model,
)
from tests.unit.trl_async_bucket.sync_bench import make_sync, publish, read_manifest
from trl_async_bucket import publish_retries
from trl_async_bucket.sync import BucketSync


def started(server: StatusServer, tmp_path: Path, *, versions: int, **changes: Any) -> BucketSync:
    """A run that has published so many versions."""
    model = tiny_peft_model()
    sync = make_sync(server, model, tmp_path, **changes)
    sync.start()
    publish(sync, versions, model)
    return sync


@pytest.mark.parametrize("first", ["interrupt", "finish"])
def test_who_ends_a_run_second_returns_when_it_is_ended(
    server: StatusServer, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a SIGTERM the trainer and the deadline's thread may meet: the process ends then."""
    closing = threading.Event()
    close = RunWriter.close

    def slow_close(writer: RunWriter, state: RunState) -> None:
        closing.set()
        time.sleep(0.5)
        close(writer, state)

    monkeypatch.setattr(RunWriter, "close", slow_close)
    sync = started(server, tmp_path, versions=1)
    thread = threading.Thread(target=getattr(sync, first))
    thread.start()
    assert closing.wait(20)
    sync.interrupt()
    expected = {"interrupt": RunState.INTERRUPTED, "finish": RunState.FINISHED}
    assert read_manifest(server).state is expected[first]
    thread.join()


def test_an_outage_while_a_run_is_marked_finished_is_waited_out(
    server: StatusServer, tmp_path: Path
) -> None:
    sync = started(server, tmp_path, versions=1)
    (tmp_path / "bucket").rename(tmp_path / "away")
    back = threading.Timer(1.0, (tmp_path / "away").rename, [tmp_path / "bucket"])
    back.start()
    sync.finish()
    back.join()
    assert read_manifest(server).state is RunState.FINISHED
    assert not sync.running


def test_a_run_that_could_not_be_marked_finished_says_what_is_left_to_do(
    server: StatusServer, tmp_path: Path
) -> None:
    sync = started(server, tmp_path, versions=2, timeout_s=3.0)
    (tmp_path / "bucket").rename(tmp_path / "away")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"last version, 2, is.*`bucket-lora finish file:"):
        sync.finish()
    assert 1.0 < time.monotonic() - began < 6.0


def test_an_interrupt_does_not_wait_for_a_run_to_be_marked_finished(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline's thread after a SIGTERM, with less time than an outage lasts."""
    monkeypatch.setattr(publish_retries, "RETRY_FIRST_S", 6.0)
    sync = started(server, tmp_path, versions=1)
    (tmp_path / "bucket").rename(tmp_path / "away")
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(sync.finish)
        time.sleep(1.0)
        (tmp_path / "away").rename(tmp_path / "bucket")
        began = time.monotonic()
        sync.interrupt()
        assert time.monotonic() - began < 3.0
        assert read_manifest(server).state is RunState.INTERRUPTED
        with pytest.raises(ConfigError, match="has ended"):
            finishing.result()

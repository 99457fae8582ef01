"""The last word of a server that ends, of which only a note of its heartbeats is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.file_store import FileStore
from adapter_bucket.layout import heartbeat_key
from adapter_bucket.store import Store
from vllm_bucket_lora.goodbye import LastWord, Note, note_heartbeats


def test_the_last_word_works_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """Python 3.12 starts no thread there any more."""
    store = FileStore.open((tmp_path / "bucket").as_uri())
    store.overwrite(heartbeat_key("run", "r-1"), b"{}")
    port = tmp_path / "session" / "port-8000"
    port.mkdir(parents=True)
    note_heartbeats(port, Note(url=store.url, replica_id="r-1", runs=["run"]))
    program = (
        "import atexit, pathlib, sys; from vllm_bucket_lora.goodbye import LastWord; "
        "atexit.register(LastWord(pathlib.Path(sys.argv[1])).say)"
    )
    command = [sys.executable, "-c", program, str(port.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""
    assert list(store.list("")) == []


def test_a_bucket_that_hangs_holds_the_end_up_for_a_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note_heartbeats(tmp_path, Note(url="u", replica_id="r-1", runs=["run"]))
    answers = threading.Event()

    def hanging(url: str) -> Store:
        answers.wait(5)
        raise StoreUnavailable("nobody answered")

    LastWord(tmp_path.parent, open_=hanging).say(limit_s=0.05)
    answers.set()
    assert "heartbeats stay until they expire" in caplog.text


def test_a_torn_note_and_an_absent_bucket_do_not_hold_up_the_end(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", '{"url": "u", "replica_id": "r", "runs": ["run"]}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "heartbeats.json").write_text(text)

    def absent(url: str) -> Store:
        raise StoreUnavailable("the network is down")

    LastWord(tmp_path, open_=absent).say()

"""The ``bucket-lora`` command over a folder: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.cli import main
from adapter_bucket.file_store import FileStore
from adapter_bucket.heartbeat import Heartbeat, write_heartbeat
from adapter_bucket.layout import WEIGHTS_FILE, file_key
from adapter_bucket.publish import RunWriter
from adapter_bucket.status import ReplicaStatus
from tests.adapters import BASE, adapter_file, version
from tests.checkpoints import claim, put_checkpoint, write_checkpoint


@pytest.fixture
def url(tmp_path: Path) -> str:
    store = FileStore.open((tmp_path / "bucket").as_uri())
    writer = RunWriter.claim(store, "run-1", base_model=BASE, window=2, writer_id="w [bold]")
    for number in (1, 2):
        writer.publish(number, **version(number))
    status = ReplicaStatus(
        replica_id="a", base_model="m", dtype="bfloat16", max_loras=4, max_lora_rank=8
    )
    write_heartbeat(
        store,
        Heartbeat(
            run_id="run-1",
            replica_id="a",
            url="http://127.0.0.1:1",
            sequence=1,
            interval_s=5,
            written_at=0,
            status=status,
        ),
    )
    return store.url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    return code, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_doctor_finds_no_problem_in_a_folder(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, found = run_json(capsys, "doctor", url, "--samples", "3")
    assert code == 0
    assert found["problems"] == []
    assert found["capabilities"]["compare_and_swap"] is True
    assert set(found["latency_ms"]["get unchanged (304)"]) == {"p50", "p90", "max"}
    code, out = run(capsys, "doctor", url, "--samples", "2")
    assert "no problems found" in out


def test_runs_and_show_tell_the_state(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, found = run_json(capsys, "runs", url)
    assert code == 0
    assert found[0]["run"] == "run-1"
    assert found[0]["latest"] == 2
    code, shown = run_json(capsys, "show", url, "run-1")
    assert [one["version"] for one in shown["versions"]] == [1, 2]
    assert shown["replicas"][0]["replica"] == "a"
    code, out = run(capsys, "show", url, "run-1")
    assert "w [bold]" in out  # text of the bucket is not markup
    assert "run-1" in run(capsys, "runs", url)[1]


def test_verify_names_the_damaged_version(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(capsys, "verify", url, "run-1")[0] == 0
    damaged = bytearray(adapter_file(2))
    damaged[-1] ^= 1
    FileStore.open(url).overwrite(file_key("run-1", 2, WEIGHTS_FILE), damaged)
    code, found = run_json(capsys, "verify", url, "run-1")
    assert code == 1
    assert [bool(one["faults"]) for one in found] == [False, True]
    assert "sha256" in run(capsys, "verify", url, "run-1")[1]


def test_export_writes_a_plain_peft_directory(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "adapter"
    assert run(capsys, "export", url, "run-1", "latest", str(target))[0] == 0
    assert (target / WEIGHTS_FILE).read_bytes() == adapter_file(2)
    assert [path.name for path in target.parent.iterdir()] == ["adapter"]
    assert run(capsys, "export", url, "run-1", "2", str(target))[0] == 1  # exists already
    code, error = run_json(capsys, "export", url, "run-1", "9", str(tmp_path / "x"))
    assert (code, error["error"]) == (1, "NotPublished")


def test_show_lists_checkpoints(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    store = FileStore.open(url)
    write_checkpoint(tmp_path / "made", 1)
    put_checkpoint(store, claim(store), tmp_path / "made", 1500)
    _, shown = run_json(capsys, "show", url, "run-1")
    assert [(one["step"], one["epoch"]) for one in shown["checkpoints"]] == [(1500, 2)]
    assert "1500" in run(capsys, "show", url, "run-1")[1]


def test_gc_removes_orphans_and_says_so(capsys: pytest.CaptureFixture[str], url: str) -> None:
    store = FileStore.open(url)
    writer = RunWriter.claim(
        store, "run-1", base_model=BASE, window=2, writer_id="x", takeover=True
    )
    store.create(file_key("run-1", 3, WEIGHTS_FILE), b"orphan")
    writer.publish(4, **version(4))
    code, found = run_json(capsys, "gc", url, "run-1", "--older-than", "-5", "--dry-run")
    assert found["keys"][0] == file_key("run-1", 3, WEIGHTS_FILE)
    assert "removed" in run(capsys, "gc", url, "run-1", "--older-than", "-5")[1]
    assert code == 0
    assert list(store.list("runs/run-1/adapters/v00000003/")) == []


def test_finish_and_delete(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(capsys, "finish", url, "run-1")[0] == 0
    assert run_json(capsys, "runs", url)[1][0]["state"] == "finished"
    assert run(capsys, "delete", url, "run-1")[0] == 1  # needs --yes
    assert run(capsys, "delete", url, "run-1", "--yes")[0] == 0
    assert run_json(capsys, "runs", url)[1][0]["state"] == "deleted"
    assert run(capsys, "delete", url, "run-1", "--yes", "--purge")[0] == 0
    assert "no runs" in run(capsys, "runs", url)[1]


def test_a_failure_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = run_json(capsys, "runs", "ftp://x")
    assert (code, error["error"]) == (1, "ConfigError")
    code, out = run(capsys, "show", "memory://cli", "no-such-run")
    assert code == 1
    assert "no manifest" in out


def test_a_run_that_cannot_be_read_is_listed_as_such(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    FileStore.open(url).create("runs/broken/manifest.json", b"{")
    code, found = run_json(capsys, "runs", url)
    assert code == 1
    assert {one["run"]: one["state"] for one in found}["broken"] == "IntegrityError"

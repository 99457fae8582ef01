"""The server's private directory: made, shared, removed, and swept up after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from vllm_bucket_lora import session as session_module
from vllm_bucket_lora.session import create_session, join_session, remove_session, sweep


def test_a_session_is_private_and_goes_with_its_server(tmp_path: Path) -> None:
    session = create_session(tmp_path)
    assert session.path.stat().st_mode & 0o077 == 0
    assert join_session(session.path) is session
    remove_session(session)
    assert list(tmp_path.iterdir()) == []


def test_a_session_in_use_by_another_process_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LAST_WAIT_S", 0.1)
    session = create_session(tmp_path)
    code = (
        "import sys; from pathlib import Path; from vllm_bucket_lora.session import join_session;"
        f"join_session(Path({str(session.path)!r})); print('joined', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"joined\n"
        remove_session(session)
        sweep(tmp_path)
        assert session.path.exists()
        other.kill()
    sweep(tmp_path)
    assert not session.path.exists()


def test_a_directory_that_cannot_be_written_is_a_setting_to_fix(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="--bucket-lora-cache-dir"):
        create_session(blocked)

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.trace_ids import root_span_id, trace_id
from adapter_bucket.traces import NO_TRACES, TRACES_ENV, open_traces, traces_wanted


def test_ids_come_from_the_name_alone_and_differ_between_versions() -> None:
    # Another release on another machine must make the same ones: these values never change.
    assert trace_id("run-v1") == "aa99446a71a0e3e645fa37ccbe9eb585"
    assert root_span_id("run-v1") == "2ca049dca07cca55"
    names = [f"run-v{number}" for number in range(1, 200)]
    assert len({trace_id(name) for name in names}) == len(names)


def test_without_the_variable_nothing_is_recorded_nor_imported() -> None:
    code = (
        "import sys; from adapter_bucket.traces import open_traces, NO_TRACES\n"
        "assert open_traces('trainer', 'r') is NO_TRACES\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={})
    NO_TRACES.record("sync", "run-v1", 0.0, 1.0)


@pytest.mark.parametrize("value", ["jaeger", "file://host/x", "file:relative", "http://x"])
def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TRACES_ENV, value)
    with pytest.raises(ConfigError, match=r"BUCKET_LORA_TRACES is .*; use otlp or file:///"):
        traces_wanted()


def test_a_file_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(TRACES_ENV, f"file://{tmp_path}/missing/spans")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        open_traces("trainer", "r")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES_ENV, "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"install trl-async-bucket\[otel\]"):
        traces_wanted()

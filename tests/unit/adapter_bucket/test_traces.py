from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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


def test_spans_reach_a_collector_before_the_process_ends() -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    code = (
        "from adapter_bucket.traces import open_traces\n"
        "open_traces('trainer', 'run').record('sync', 'run-v1', 1.0, 3.5, root=True)"
    )
    env = {
        **os.environ, TRACES_ENV: "otlp", "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
    }  # fmt: skip
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    request = ExportTraceServiceRequest.FromString(b"".join(bodies))
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("sync", trace_id("run-v1"))
    assert (span.span_id.hex(), span.parent_span_id) == (root_span_id("run-v1"), b"")
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(2.5e9, abs=1e4)

"""Spans of a sync for OpenTelemetry, if ``BUCKET_LORA_TRACES`` asks for them.

Owns where they go and how the parts of one sync find together. Without the variable nothing of
OpenTelemetry is imported; with it, the ``otel`` extra is needed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from adapter_bucket.trace_ids import root_span_id, trace_id

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

TRACES_ENV = "BUCKET_LORA_TRACES"
CLOCK_SET_S = 0.01
"""A difference above what reading two clocks can make."""


class Traces:
    """Records what happened, after it happened: work is never done inside a span.

    Thread-safe. A span that cannot be delivered is lost; nothing waits for it.
    """

    def record(
        self,
        name: str,
        adapter: str,
        began_at: float,
        ended_at: float,
        *,
        root: bool = False,
        **attributes: str | int | float,
    ) -> None:
        """Record one part of a version's sync. Here: nothing.

        Args:
            name: ``sync`` for the whole, else the part.
            adapter: The version's name: it decides the trace.
            began_at: ``time.monotonic``, seconds.
            ended_at: The same.
            root: This is the whole sync, whose parts the others are.
            attributes: What else is known; no text from outside.
        """


NO_TRACES = Traces()


def traces_wanted() -> bool:
    """Whether the environment asks for traces; also checks that they can be made.

    Raises:
        ConfigError: the variable's value, or the missing extra.
    """
    asked = os.environ.get(TRACES_ENV, "")
    if not asked:
        return False
    parts = urlsplit(asked)
    is_file = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    if asked != "otlp" and not is_file:
        raise ConfigError(f"{TRACES_ENV} is {asked[:100]!r}; use otlp or file:///absolute/path")
    try:
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{TRACES_ENV} is set and OpenTelemetry is not installed ({error}); install "
            "trl-async-bucket[otel], or unset it"
        ) from None
    return True


def open_traces(part: str, instance: str) -> Traces:
    """The traces of this process.

    Args:
        part: ``trainer`` or ``replica``.
        instance: Which one.

    Raises:
        ConfigError: see ``traces_wanted``.
    """
    return _OtelTraces(_processor(), part, instance) if traces_wanted() else NO_TRACES


class _OtelTraces(Traces):
    """Spans of a provider of our own: the process's global one belongs to somebody else."""

    def __init__(self, processor: SpanProcessor, part: str, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class Ids(RandomIdGenerator):
            """Random, but for a root span, whose ids other machines know."""

            of_root = threading.local()

            def generate_trace_id(self) -> int:
                return int(trace_id(self.of_root.adapter), 16)

            def generate_span_id(self) -> int:
                adapter = getattr(self.of_root, "adapter", None)
                return super().generate_span_id() if adapter is None else _root_id(adapter)

        self._ids = Ids()
        resource = Resource.create(
            {"service.name": f"bucket-lora-{part}", "service.instance.id": instance}
        )
        # Every sync, or its parts on other machines would be left without a whole.
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids)
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("adapter_bucket.traces")
        self._offset = _wall_offset_s()

    def record(
        self,
        name: str,
        adapter: str,
        began_at: float,
        ended_at: float,
        *,
        root: bool = False,
        **attributes: str | int | float,
    ) -> None:
        """Hand the span to the exporter: a file's at once, OTLP's on a thread of its own."""
        from opentelemetry import context, trace

        offset_s = self._offset_s()
        parent = context.Context()
        if not root:
            whole = trace.SpanContext(
                int(trace_id(adapter), 16),
                _root_id(adapter),
                is_remote=True,
                trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            )
            parent = trace.set_span_in_context(trace.NonRecordingSpan(whole), parent)
        self._ids.of_root.adapter = adapter if root else None
        span = self._tracer.start_span(
            name,
            context=parent,
            start_time=int((began_at + offset_s) * 1e9),
            attributes={"bucket_lora.adapter": adapter, **attributes},
        )
        span.end(end_time=int((ended_at + offset_s) * 1e9))

    def _offset_s(self) -> float:
        """The same for all spans, so that they fit together, until the clock was set."""
        found = _wall_offset_s()
        if abs(found - self._offset) > CLOCK_SET_S:
            self._offset = found
        return self._offset


def _wall_offset_s() -> float:
    """Unix time minus the monotonic clock, by the reading that was interrupted least."""
    readings = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) / 2


def _root_id(adapter: str) -> int:
    return int(root_span_id(adapter), 16)


def _processor() -> SpanProcessor:
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SimpleSpanProcessor,
    )

    asked = os.environ[TRACES_ENV]
    if asked == "otlp":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                f"{TRACES_ENV}=otlp needs the OTLP exporter ({error}); install "
                "trl-async-bucket[otel]"
            ) from None
        # Endpoint and headers: OpenTelemetry's own variables. A process that is killed loses the
        # spans of its last second.
        return BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=1000)
    path = Path(urlsplit(asked).path)
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{TRACES_ENV}: {path} cannot be written: {error.strerror}") from None
    return SimpleSpanProcessor(
        ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    )

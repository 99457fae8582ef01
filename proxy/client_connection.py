"""One client's connection: takes generations out of the server before they become ASGI requests.

For everything else it is uvicorn's protocol, unchanged. For a generation too uvicorn parses, keeps
pipelined requests in their order, and decides how long a connection lives; but in place of a task
that runs an app, the request body is collected here and a ``Generation`` is begun, which answers
through ``respond`` and ``stream`` without waiting for anything. Builds on uvicorn 0.53 and 0.54.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from adapter_bucket.errors import UnsupportedUpstream
from bucket_lora_proxy.cycle import Cycle, Phase, generation_path
from bucket_lora_proxy.errors import ApiError, ErrorType, Headers
from bucket_lora_proxy.forward import Forwarder
from bucket_lora_proxy.generation import Generation
from bucket_lora_proxy.guard import GuardedProtocol
from bucket_lora_proxy.request_body import too_large, too_slow

log = logging.getLogger("bucket_lora_proxy")


def check_server(protocol: type) -> None:
    """Refuse a uvicorn that would not ask this module: it would answer generations with 405.

    Raises:
        UnsupportedUpstream: it is older (or made otherwise).
    """
    if not hasattr(protocol, "_start_asgi_task"):
        raise UnsupportedUpstream(
            f"uvicorn {uvicorn.__version__} begins requests in another way; install 0.53 or 0.54"
        )


check_server(HttpToolsProtocol)


class ClientConnection(GuardedProtocol):
    """The ``Client`` of its generations, of which there is one at a time."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        forwarder: Forwarder,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._forwarder = forwarder
        self.expect_100_continue = False
        self._active: Cycle | None = None
        """uvicorn's state of the request that is being received or answered here; the one of
        ``self.cycle`` is the newest, and may have to wait for it."""
        self._phase = Phase.ANSWER
        self._generation: Generation | None = None
        self._parsing = False
        self._body_timer: asyncio.TimerHandle | None = None
        self._once_writable: Callable[[], None] | None = None
        self._stream_head = b""
        self._unsent = b""
        """Of answers, and to be written before anything else is."""

    # --- receiving ---

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        path = generation_path(self.parser.get_method(), self.url)
        if path is None:
            # Now make what uvicorn makes of every request at its beginning.
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.expect_100_continue = url, expects
            self.headers += headers
            super().on_headers_complete()
            return
        self._end_head()
        before = self.cycle
        version = self.parser.get_http_version()
        self.cycle = cycle = Cycle(
            path,
            version,
            self.headers,
            expects_100=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not isinstance(cycle, Cycle):
            super()._start_asgi_task(cycle, app)
            return
        self._active, self._phase = cycle, Phase.HEAD
        if not self._parsing:
            # It waited behind another one. Not at once: a thousand small requests that were sent
            # together would be answered inside each other.
            self.loop.call_soon(self._go_on)

    def data_received(self, data: bytes) -> None:
        self._parsing = True
        GuardedProtocol.data_received(self, data)
        self._parsing = False
        if self._active is not None:
            self._go_on()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        cycle = self.cycle
        if not isinstance(cycle, Cycle):
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.parts.append(body)
            cycle.size += len(body)
            if cycle.size > HIGH_WATER_LIMIT and cycle is not self._active:
                self.flow.pause_reading()

    def _go_on(self) -> None:
        """Do what can be done with what has been received. Not while parsing: an error in what
        came together with a request is to be seen first.
        """
        cycle = self._active
        if cycle is None or self._phase is Phase.ANSWER or self.transport.is_closing():
            return
        try:
            if self._phase is Phase.HEAD:
                self._forwarder.admit(cycle.http_version, cycle.headers)
                self._phase = Phase.BODY
            if cycle.size > self._forwarder.config.max_body_bytes:
                raise too_large(self._forwarder.config.max_body_bytes)
            if cycle.more_body:
                self._wait_for_body(cycle)
            else:
                self._run(cycle)
        except ApiError as error:
            self.refuse(error)
        except Exception:
            log.exception("serving %s failed", cycle.path)
            self.refuse(ApiError(500, ErrorType.INTERNAL, "a fault of the proxy; see its log"))

    def _wait_for_body(self, cycle: Cycle) -> None:
        if cycle.waiting_for_100_continue:
            cycle.waiting_for_100_continue = False
            self._send()
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._body_timer is None:
            timeout_s = self._forwarder.config.body_timeout_s
            self._body_timer = self.loop.call_later(timeout_s, self._body_too_slow)

    def _body_too_slow(self) -> None:
        self._body_timer = None
        self.refuse(too_slow())

    def _run(self, cycle: Cycle) -> None:
        self._phase = Phase.ANSWER
        self._stop_body_timer()
        generation = self._forwarder.begin(self, cycle.path, cycle.headers, cycle.take_body())
        if self._active is cycle:  # not answered yet
            self._generation = generation

    # --- answering ---

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._phase = Phase.ANSWER
        self._stop_body_timer()
        if self.flow.write_paused:
            self._once_writable = partial(self.respond, status, headers, body)
            return
        cycle = self._answering()
        self._unsent += self._head(cycle, status, headers) + body
        if cycle.keep_alive:
            self._forwarder.outbox.add(self._send)
        else:
            self._send()
        self._complete(cycle)

    def _send(self) -> None:
        data, self._unsent = self._unsent, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def refuse(self, error: ApiError) -> None:
        self._forwarder.remember(error)
        body = error.body()
        length = (b"content-length", b"%d" % len(body))
        self.respond(error.status, [*error.headers(), length], body)

    def start_stream(self, status: int, headers: Headers) -> None:
        chunked = (b"transfer-encoding", b"chunked")
        self._stream_head = self._head(self._answering(), status, [*headers, chunked])
        if self.flow.write_paused and self._generation is not None:
            self._generation.hold(True)

    def stream(self, data: bytes, *, last: bool) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._send()
        head, self._stream_head = self._stream_head, b""
        self.transport.write(b"".join((head, chunk, b"0\r\n\r\n" if last else b"")))
        if last:
            self._complete(self._answering())

    def cut(self) -> None:
        self._send()
        if self._active is not None:
            self._active.disconnected = True
        self._active = self._generation = None
        self.transport.close()

    def _answering(self) -> Cycle:
        if self._active is None:
            raise RuntimeError("there is no request to answer")
        return self._active

    def _head(self, cycle: Cycle, status: int, headers: Headers) -> bytes:
        """The bytes of a head. A parser has checked every field that came from elsewhere."""
        cycle.response_started = True
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            if name == b"connection":  # only the proxy's own errors have it
                cycle.keep_alive = False
            else:
                parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _complete(self, cycle: Cycle) -> None:
        """The answer is written: uvicorn goes on with what comes next on this connection."""
        self._active = self._generation = None
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    # --- the connection ---

    def send_400_response(self, msg: str) -> None:
        self._send()
        super().send_400_response(msg)

    def shutdown(self) -> None:
        self._send()
        super().shutdown()

    def _too_slow(self) -> None:
        self._send()
        super()._too_slow()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._generation is not None:
            self._generation.hold(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._generation is not None:
            self._generation.hold(False)
        if self._once_writable is not None:
            write, self._once_writable = self._once_writable, None
            write()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_body_timer()
        self._active = self._once_writable = None
        self._unsent = b""
        if self._generation is not None:
            self._generation.client_gone()
            self._generation = None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

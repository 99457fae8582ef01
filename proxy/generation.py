"""One generation: finds a replica, passes its answer on, and asks another while that is invisible.

A request may be sent again only while the client has received nothing of an answer. For a streamed
answer that ends with its first piece; any other answer is collected first, so a cut body can be
retried too. Once a stream has begun, a failure closes the client's connection without the final
chunk: it can never be taken for a complete answer.

It is a state machine of callbacks and not a coroutine, because a task and the futures it waits for
cost a third of all that a generation costs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from bucket_lora_proxy.attempt import Attempt, Request
from bucket_lora_proxy.client import Client
from bucket_lora_proxy.errors import (
    RETRY_AFTER_S,
    AnswerTooLarge,
    ApiError,
    ErrorType,
    UpstreamError,
    UpstreamTimeout,
    gave_up,
)
from bucket_lora_proxy.headers import for_client, is_event_stream
from bucket_lora_proxy.replicas import Replica

if TYPE_CHECKING:
    from bucket_lora_proxy.forward import Forwarder

log = logging.getLogger("bucket_lora_proxy")

_BUSY = frozenset({429, 500, 502, 503})
"""Answers after which another replica is asked; the last one is passed on. Not 504: a gateway gave
up on a long generation, and would do so again."""

_NO_SUCH_ROUTE = b'{"detail":"Not Found"}'
"""Body of a 404 that is about the path and not about the model."""


class Generation:
    """Guarantees: the client receives one answer, or an error, or an aborted stream; a replica is
    sent a generation only while its last status lists the named adapter (or base model) as ready;
    its in-flight count goes down on every way out.
    """

    def __init__(self, forwarder: Forwarder, client: Client, request: Request) -> None:
        self._forwarder = forwarder
        self._metrics = forwarder.metrics
        self._client = client
        self._request = request
        self._begun = time.perf_counter()
        self._waiting: asyncio.Task[None] | None = None
        """Set while no replica may be asked."""
        self._attempt: Attempt | None = None
        """Set while a replica is being asked."""
        self._tried: list[Replica] = []
        self._fault: UpstreamError | None = None
        self._started = False
        """Something of an answer has been handed to the client's connection."""
        self._over = False

    def start(self) -> None:
        """Ask the first replica."""
        try:
            self._next_replica()
        except Exception:
            self._break_off()

    def _next_replica(self) -> None:
        """Ask a (further) replica, as soon as there is one."""
        if len(self._tried) == self._forwarder.config.max_attempts:
            self._give_up()
        elif found := self._forwarder.fleet.serving(self._request.model):
            self._ask(found)
        else:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        admission, model = self._forwarder.admission, self._request.model
        try:
            try:
                found = await admission.candidates(model, retry=bool(self._tried))
            finally:
                self._waiting = None
            self._ask(found)
        except ApiError as error:
            self._refuse(error)
        except Exception:
            self._break_off()

    def _ask(self, found: list[Replica]) -> None:
        forwarder, request = self._forwarder, self._request
        choice = forwarder.router.pick(found, request.prompt, tried=self._tried)
        if choice is None:
            self._give_up()
            return
        replica = choice.replica
        self._tried.append(replica)
        attempts_left = len(self._tried) < forwarder.config.max_attempts
        others = attempts_left and not set(found).issubset(self._tried)
        self._metrics.routed(choice.outcome, request.prompt.tokens, choice.matched_tokens)
        self._metrics.attempts.add(replica.url)
        asked = time.perf_counter()
        exchange = replica.data.begin(
            b"POST",
            request.target,
            timeout_s=forwarder.config.response_timeout_s,
            consumer=self,
            headers=request.headers,
            body=request.body,
        )
        self._attempt = attempt = Attempt(choice, exchange, last=not others, asked=asked)
        # Counted now that it is on its way: to note a new prompt takes as long as to decide.
        attempt.trial = replica.begin(request.model)
        attempt.work = forwarder.router.begin(choice, request.prompt)

    # --- what the exchange calls ---

    def received(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        try:
            if attempt.status or self._accept_head(attempt):
                self._take_body(attempt)
        except Exception:
            self._break_off()

    def failed(self, error: UpstreamError) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        try:
            self._note(attempt, error)
            self._leave_replica()
            if self._started:
                log.warning("stream of %s aborted: %s", self._request.model, error)
                self._abort()
                return
            self._fault = error
            if isinstance(error, UpstreamTimeout | AnswerTooLarge):
                self._give_up()  # elsewhere it would be the same
            else:
                self._next_replica()
        except Exception:
            self._break_off()

    def _accept_head(self, attempt: Attempt) -> bool:
        """Whether what follows is for the client; if not, another replica is asked."""
        attempt.headed = time.perf_counter()
        status = attempt.exchange.status
        if status >= 500:
            attempt.replica.breaker.fail(asyncio.get_running_loop().time(), attempt.trial)
        if status in _BUSY and not attempt.last:
            self._ask_another(str(status))
            return False
        attempt.status = status
        attempt.streaming = status == 200 and is_event_stream(attempt.exchange.headers)
        return True

    def _take_body(self, attempt: Attempt) -> None:
        data, complete = attempt.exchange.take(), attempt.exchange.complete
        if attempt.streaming:
            if data or complete:  # until the first piece the request can still be sent elsewhere
                self._pass_on(attempt, data, last=complete)
            return
        attempt.parts.append(data)
        attempt.size += len(data)
        limit = self._forwarder.config.max_answer_bytes
        if attempt.size > limit:
            self.failed(AnswerTooLarge(f"{attempt.replica.url}: answer above {limit} bytes"))
        elif complete:
            self._deliver(attempt, data if len(attempt.parts) == 1 else b"".join(attempt.parts))

    def _pass_on(self, attempt: Attempt, data: bytes, *, last: bool) -> None:
        if not self._started:
            self._started = True
            self._client.start_stream(attempt.status, for_client(attempt.exchange.headers))
        if last:
            self._succeed(attempt)
        self._client.stream(data, last=last)
        if last:
            self._finish("200")

    def _deliver(self, attempt: Attempt, body: bytes) -> None:
        status = attempt.status
        if status == 404 and self._lacks_adapter(attempt.replica, body):
            self._ask_another("not_ready")
            return
        headers = for_client(attempt.exchange.headers)
        if status != 204:  # RFC 9110 section 8.6
            headers.append((b"content-length", b"%d" % len(body)))
        if status == 200:
            self._succeed(attempt)
        self._leave_replica()
        self._started = True
        self._client.respond(status, headers, body)
        self._finish(str(status))

    def _lacks_adapter(self, replica: Replica, body: bytes) -> bool:
        model = self._request.model
        if model is None or model in replica.base_models or body == _NO_SUCH_ROUTE:
            return False
        replica.lacks(model)
        return True

    def _succeed(self, attempt: Attempt) -> None:
        attempt.replica.breaker.succeed()
        self._metrics.phases.observe(attempt.headed - attempt.asked, "first_byte")
        self._metrics.phases.observe(time.perf_counter() - attempt.headed, "answer")
        self._leave_replica()

    def _ask_another(self, cause: str) -> None:
        self._metrics.retries.add(cause)
        self._leave_replica()
        self._next_replica()

    def _leave_replica(self) -> None:
        """The exchange is over, one way or another."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.exchange.close()
            self._forwarder.router.end(attempt.choice, attempt.work)
            attempt.replica.end(self._request.model, attempt.trial)

    def _note(self, attempt: Attempt, error: UpstreamError) -> None:
        self._metrics.retries.add(type(error).__name__)
        if attempt.status < 500 and not isinstance(error, AnswerTooLarge):  # else it is counted
            attempt.replica.breaker.fail(asyncio.get_running_loop().time(), attempt.trial)
        if not isinstance(error, UpstreamTimeout | AnswerTooLarge):
            self._forwarder.watcher.failed(attempt.replica, str(error))

    # --- what the client's connection calls ---

    def hold(self, held: bool) -> None:
        """The client does not read fast enough, or does again."""
        if self._attempt is not None and self._attempt.streaming:
            self._attempt.exchange.hold(held)

    def client_gone(self) -> None:
        """The client left: stop, so that the replica stops too."""
        if not self._over:
            self._metrics.disconnects.add()
            self._end()

    def stop(self) -> None:
        """The proxy stops and does not wait any longer."""
        if self._over:
            return
        if self._started:
            self._abort()
        else:
            self._refuse(
                ApiError(
                    503,
                    ErrorType.NO_REPLICA,
                    "the proxy is stopping; nothing was delivered, the request can be sent again",
                    retry_after_s=RETRY_AFTER_S,
                )
            )

    # --- ends ---

    def _end(self) -> None:
        self._over = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._leave_replica()
        self._forwarder.running.discard(self)

    def _finish(self, status: str) -> None:
        self._end()
        self._metrics.requests.add(status)
        self._metrics.seconds.observe(time.perf_counter() - self._begun)

    def _abort(self) -> None:
        self._finish("aborted")
        self._client.cut()

    def _refuse(self, error: ApiError) -> None:
        self._end()
        self._metrics.requests.add(str(error.status))
        self._client.refuse(error)

    def _give_up(self) -> None:
        self._refuse(gave_up(self._request.model, len(self._tried), self._fault))

    def _break_off(self) -> None:
        """A fault of this program: say so in the log, and let nothing hang."""
        log.exception("serving %s failed", self._request.target.decode())
        if self._started:
            self._abort()
        else:
            self._refuse(ApiError(500, ErrorType.INTERNAL, "a fault of the proxy; see its log"))

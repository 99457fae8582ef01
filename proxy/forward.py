"""Forwards one generation: picks a replica, copies the answer, and retries while that is invisible.

A request may be sent again only while the client has received nothing of an answer. For a streamed
answer that ends with its first piece; any other answer is collected first, so a cut body can be
retried too. Once a stream has begun, a failure closes the client's connection without the final
chunk: it can never be taken for a complete answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from bucket_lora_proxy.admission import RETRY_AFTER_S, Admission
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.disconnect import CLIENT_CONNECTION, CancelOnDisconnect, ClientConnection
from bucket_lora_proxy.errors import (
    AnswerTooLarge,
    ApiError,
    ClientGone,
    ConnectFailed,
    ErrorType,
    GivenUp,
    Headers,
    NoResponse,
    UpstreamError,
    UpstreamTimeout,
)
from bucket_lora_proxy.headers import for_client, for_upstream
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.prefix import Hasher, Prompt
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.request_body import read_fields, receive_body
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.upstream import Response
from bucket_lora_proxy.watcher import Watcher
from starlette.types import Receive, Scope, Send

log = logging.getLogger("bucket_lora_proxy")

_BUSY = frozenset({429, 500, 502, 503})
"""Answers after which another replica is asked; the last one is passed on. Not 504: a gateway gave
up on a long generation, and would do so again."""

_NO_SUCH_ROUTE = b'{"detail":"Not Found"}'
"""Body of a 404 that is about the path and not about the model."""


@dataclass
class Job:
    """One generation on its way."""

    target: bytes
    headers: Headers
    body: bytes
    model: str | None
    prompt: Prompt
    send: Send
    connection: ClientConnection | None
    started: bool = False
    """Something of an answer has been handed to the client's connection."""


class Forwarder:
    """The hot path. Plain ASGI: no request or response object is made.

    Guarantees: a replica is sent a generation only while its last status lists the named adapter
    (or base model) as ready; the client receives one answer, or an error, or an aborted stream;
    a replica's in-flight count goes down on every way out.
    """

    def __init__(
        self,
        config: ProxyConfig,
        admission: Admission,
        router: Router,
        watcher: Watcher,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._router = router
        self._hasher = Hasher()
        self._admission = admission
        self._watcher = watcher
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ApiError: to be answered by the caller; nothing has been sent.
            ClientGone: the client left.
        """
        config = self._config
        if scope["http_version"] == "1.0":
            # Its streams end with the connection: a cut one could not be told from a whole one.
            raise ApiError(505, ErrorType.BAD_REQUEST, "generations need HTTP/1.1")
        headers: Headers = scope["headers"]
        connection: ClientConnection | None = scope.get(CLIENT_CONNECTION)
        body = await receive_body(
            receive,
            headers,
            max_bytes=config.max_body_bytes,
            timeout_s=config.body_timeout_s,
            connection=connection,
        )
        begun = time.perf_counter()
        fields = read_fields(body)
        job = Job(
            target=scope["path"].encode(),
            headers=for_upstream(headers),
            body=body,
            model=fields.model,
            prompt=self._hasher.prompt(*fields),
            send=send,
            connection=connection,
        )
        try:
            async with CancelOnDisconnect(receive, scope):
                status = await self._serve(job)
        except ClientGone:
            self._metrics.disconnects.inc()
            raise
        except ApiError as error:
            self._metrics.status(str(error.status)).inc()
            raise
        self._metrics.status(status).inc()
        self._metrics.seconds.observe(time.perf_counter() - begun)

    async def _serve(self, job: Job) -> str:
        tried: list[Replica] = []
        fault: UpstreamError | None = None
        while len(tried) < self._config.max_attempts:
            candidates = await self._admission.candidates(job.model, retry=bool(tried))
            choice = self._router.pick(candidates, job.prompt, tried=tried)
            if choice is None:
                break
            replica = choice.replica
            tried.append(replica)
            others = any(candidate not in tried for candidate in candidates)
            last = not others or len(tried) == self._config.max_attempts
            self._metrics.routed(choice.outcome, job.prompt.tokens, choice.matched_tokens)
            replica.begin(job.model)
            work = self._router.begin(choice, job.prompt)
            try:
                status = await self._attempt(job, replica, last=last)
            except UpstreamError as error:
                fault = error
                self._note(replica, error)
                if job.started:
                    log.warning("stream of %s aborted: %s", job.model, error)
                    if job.connection is not None:
                        job.connection.cut()
                    return "aborted"
                if isinstance(error, UpstreamTimeout | AnswerTooLarge):
                    break  # elsewhere it would be the same
            else:
                if status is not None:
                    return status
            finally:
                self._router.end(choice, work)
                replica.end(job.model)
        raise self._gave_up(job, tried, fault)

    async def _attempt(self, job: Job, replica: Replica, *, last: bool) -> str | None:
        """Ask one replica. Returns the status delivered, or ``None`` if another should be asked."""
        self._metrics.attempts.labels(replica.url).inc()
        begun = time.perf_counter()
        response = await replica.data.request(
            b"POST",
            job.target,
            timeout_s=self._config.response_timeout_s,
            headers=job.headers,
            body=job.body,
        )
        headed = time.perf_counter()
        with response:
            status = response.status
            if status >= 500:
                replica.breaker.fail(asyncio.get_running_loop().time())
            if status == 404 and await self._lacks_adapter(job, replica, response):
                self._metrics.retries.labels("not_ready").inc()
                return None
            if status in _BUSY and not last:
                self._metrics.retries.labels(str(status)).inc()
                return None
            if _is_stream(response.headers):
                await self._stream(job, response)
            else:
                await self._whole(job, response)
            if status == 200:
                replica.breaker.succeed()
                self._metrics.first_byte.observe(headed - begun)
                self._metrics.answer.observe(time.perf_counter() - headed)
            return str(status)

    async def _lacks_adapter(self, job: Job, replica: Replica, response: Response) -> bool:
        if job.model is None or job.model in replica.base_models:
            return False
        if await response.peek() == _NO_SUCH_ROUTE:
            return False
        replica.lacks(job.model)
        return True

    async def _whole(self, job: Job, response: Response) -> None:
        body = await response.read(max_bytes=self._config.max_answer_bytes)
        headers = for_client(response.headers)
        if response.status != 204:  # RFC 9110 section 8.6
            headers.append((b"content-length", str(len(body)).encode()))
        job.started = True
        if job.connection is not None and job.connection.respond(response.status, headers, body):
            return
        await job.send(
            {"type": "http.response.start", "status": response.status, "headers": headers}
        )
        await job.send({"type": "http.response.body", "body": body})

    async def _stream(self, job: Job, response: Response) -> None:
        chunk = await response.next_chunk()  # until here the request can still be sent elsewhere
        job.started = True
        await job.send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": for_client(response.headers),
            }
        )
        while chunk:
            await job.send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await response.next_chunk()
        await job.send({"type": "http.response.body", "body": b""})

    def _note(self, replica: Replica, error: UpstreamError) -> None:
        self._metrics.retries.labels(type(error).__name__).inc()
        if not isinstance(error, AnswerTooLarge):
            replica.breaker.fail(asyncio.get_running_loop().time())
        if not isinstance(error, UpstreamTimeout | AnswerTooLarge):
            self._watcher.failed(replica, str(error))

    def _gave_up(self, job: Job, tried: list[Replica], fault: UpstreamError | None) -> ApiError:
        if fault is None:
            return ApiError(
                503,
                ErrorType.ADAPTER_NOT_READY,
                f"model {job.model!r} was listed as ready but {len(tried)} replicas did not serve "
                "it; it is being loaded again or was just retired",
                retry_after_s=RETRY_AFTER_S,
            )
        timed_out = isinstance(fault, UpstreamTimeout)
        delivered = "nothing was sent" if isinstance(fault, ConnectFailed) else "no answer came"
        if not isinstance(fault, ConnectFailed | NoResponse | GivenUp | UpstreamTimeout):
            delivered = "the answer was cut"
        return ApiError(
            504 if timed_out else 502,
            ErrorType.REPLICA_TIMEOUT if timed_out else ErrorType.REPLICA_FAILED,
            f"{len(tried)} attempts failed, last: {fault} ({delivered}); the request can be sent "
            "again",
            retry_after_s=RETRY_AFTER_S,
        )


def _is_stream(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )

"""State-changing calls of a trainer that pushes adapters: sent to every replica in rotation.

Off unless ``--allow-broadcast`` is given, because replicas read the paths that these calls name.
Replicas that are down take no part: they are not sent anything before they list an adapter again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass

from bucket_lora_proxy.admission import no_replica
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.errors import ApiError, ErrorType, UpstreamError
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.watcher import MAX_CONTROL_BYTES, Watcher

log = logging.getLogger("bucket_lora_proxy")

RETRY_S = 0.5
"""Pause before a replica is asked again for an adapter that its mount does not show yet, or to
resume."""

_NO_ROUTE = b'{"detail":"Not Found"}'


@dataclass(frozen=True)
class Reply:
    """What one replica answered."""

    status: int
    body: bytes

    @property
    def good(self) -> bool:
        return self.status == 200


class Broadcast:
    """One call at a time, in the order of arrival: a load and an unload never race.

    Guarantees: a load is ready on every replica in rotation or on none of them; a pause ends with
    the lease at the latest; a replica that does not resume gets no generation until it does.
    """

    def __init__(self, config: ProxyConfig, fleet: Fleet, router: Router, watcher: Watcher) -> None:
        self._config = config
        self._fleet = fleet
        self._router = router
        self._watcher = watcher
        self._turn = asyncio.Lock()
        self._paused: set[Replica] = set()
        """Replicas that were sent a pause since the last resume."""
        self._lease: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, body: bytes) -> Reply:
        """``POST /v1/load_lora_adapter``: all or nothing.

        A name that is loaded already is refused, by the replica: also under the same path there may
        be other files by now. TRL names the adapters of every run alike, so one that starts again
        would be told that its weights are served, and trained on answers of the run before.

        Raises:
            ApiError: 504 if a replica still does not see the files after ``broadcast_wait_s``; the
                replica's own status and text for any other refusal; 503 if no answer came. Nothing
                stays loaded then, also not on a replica that loaded it and whose answer was lost.
        """
        name, path = _adapter(body)
        async with self._turn:
            replicas = self._in_rotation()
            deadline = asyncio.get_running_loop().time() + self._config.broadcast_wait_s
            answers = await self._all(replicas, lambda r: self._load_one(r, name, path, deadline))
            bad = {r: reply for r, reply in answers.items() if not reply.good}
            if bad or not answers:
                await self._roll_back(set(replicas) - set(bad), name)
                raise _refusal("load", name, bad) if bad else no_replica(self._fleet)
            for replica in answers:
                replica.gains(name)
            self._fleet.notify()
        return Reply(200, f"Success: LoRA adapter '{name}' added successfully.".encode())

    async def _load_one(self, replica: Replica, name: str, path: str, deadline: float) -> Reply:
        body = json.dumps({"lora_name": name, "lora_path": path}).encode()
        while True:
            # On a fresh connection: one that is used again and ends is taken for an idle one that
            # timed out, and the load sent again. It is refused if the first one was carried out.
            replica.control.drop_idle()
            reply = await self._post(replica, b"/v1/load_lora_adapter", body)
            missing = reply.status == 404 and reply.body != _NO_ROUTE
            if not missing:
                return reply
            if asyncio.get_running_loop().time() + RETRY_S > deadline:
                return Reply(504, reply.body)
            await asyncio.sleep(RETRY_S)

    async def _roll_back(self, replicas: Iterable[Replica], name: str) -> None:
        answers = await self._unload(replicas, name)
        for replica, reply in answers.items():
            replica.loses(name)  # again: a look in between may have seen it
            if not _unloaded(reply):
                log.error("replica %s kept %s: it answered %d", replica.url, name, reply.status)

    async def _unload(self, replicas: Iterable[Replica], name: str) -> dict[Replica, Reply]:
        asked = list(replicas)
        for replica in asked:
            replica.loses(name)  # first: nothing may be sent to an adapter that is going
        body = json.dumps({"lora_name": name}).encode()
        return await self._all(asked, lambda r: self._post(r, b"/v1/unload_lora_adapter", body))

    async def unload(self, body: bytes) -> Reply:
        """``POST /v1/unload_lora_adapter``: a replica that does not know the name is no error."""
        name, _ = _adapter(body)
        async with self._turn:
            answers = await self._unload(self._in_rotation(), name)
            bad = {r: reply for r, reply in answers.items() if not _unloaded(reply)}
            if bad:
                raise _refusal("unload", name, bad)
        return Reply(200, f"Success: LoRA adapter '{name}' removed successfully.".encode())

    async def pause(self, query: bytes) -> Reply:
        """``POST /pause``: on all or on none; resumed by itself after ``pause_lease_s``."""
        async with self._turn:
            target = b"/pause" + (b"?" + query if query else b"")
            replicas = self._in_rotation()
            self._paused |= set(replicas)
            answers = await self._all(replicas, lambda r: self._post(r, target))
            bad = {r: reply for r, reply in answers.items() if not reply.good}
            if bad:
                await self._resume()
                raise _refusal("pause", "", bad)
            self._renew_lease()
        return Reply(200, b'{"status":"paused"}')

    async def resume(self) -> Reply:
        """``POST /resume``: a replica that does not gets no generations until it does."""
        async with self._turn:
            self._end_lease()
            bad = await self._resume()
            if bad:
                raise _refusal("resume", "", bad)
        return Reply(200, b'{"status":"resumed"}')

    async def _resume(self) -> dict[Replica, Reply]:
        """Resume what is in rotation and what was paused; returns who refused."""
        asked = self._paused | set(self._fleet.up())
        answers = await self._all(asked, lambda r: self._post(r, b"/resume"))
        self._paused.clear()
        bad = {}
        for replica in asked:
            reply = answers.get(replica)
            if reply is not None and reply.good:
                continue
            if reply is not None:
                bad[replica] = reply
            replica.held = "it was paused and has not resumed"
            log.error("replica %s gets no generations: %s", replica.url, replica.held)
            self._start(self._resume_until_done(replica))
        return bad

    async def _resume_until_done(self, replica: Replica) -> None:
        while not replica.gone:
            await asyncio.sleep(RETRY_S)
            reply = (await self._all([replica], lambda r: self._post(r, b"/resume"))).get(replica)
            if reply is not None and (reply.good or reply.body == _NO_ROUTE):
                replica.held = None
                self._fleet.notify()
                return

    def _renew_lease(self) -> None:
        self._end_lease()
        loop = asyncio.get_running_loop()
        self._lease = loop.call_later(self._config.pause_lease_s, self._lease_ended)

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _lease_ended(self) -> None:
        self._lease = None
        log.warning("nobody resumed within %g s of a pause: resuming", self._config.pause_lease_s)
        self._start(self._resume_all())

    async def _resume_all(self) -> None:
        async with self._turn:
            await self._resume()

    async def reset_prefix_cache(self, query: bytes) -> Reply:
        """``POST /reset_prefix_cache`` on every replica."""
        async with self._turn:
            target = b"/reset_prefix_cache" + (b"?" + query if query else b"")
            answers = await self._all(self._in_rotation(), lambda r: self._post(r, target))
            for replica in answers:
                self._router.index.drop_slot(replica.slot)
            bad = {r: reply for r, reply in answers.items() if not reply.good}
            if bad:
                raise _refusal("reset the prefix cache", "", bad)
        return Reply(200, b"")

    async def close(self) -> None:
        """Resume what is still paused: a stopped proxy must not leave a paused fleet behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_lease()
        held = {replica for replica in self._fleet.replicas if replica.held is not None}
        await self._all(self._paused | held, lambda r: self._post(r, b"/resume"))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _in_rotation(self) -> list[Replica]:
        replicas = self._fleet.up()
        if not replicas:
            raise no_replica(self._fleet)
        return replicas

    async def _all(
        self, replicas: Iterable[Replica], call: Callable[[Replica], Awaitable[Reply]]
    ) -> dict[Replica, Reply]:
        """Answers of those that answer; one that does not leaves the rotation."""
        asked = list(replicas)
        results = await asyncio.gather(*(call(r) for r in asked), return_exceptions=True)
        answers = {}
        for replica, result in zip(asked, results, strict=True):
            if isinstance(result, Reply):
                answers[replica] = result
            elif isinstance(result, UpstreamError):
                self._watcher.failed(replica, str(result))
            else:
                raise result
        return answers

    async def _post(self, replica: Replica, target: bytes, body: bytes = b"") -> Reply:
        status, text = await replica.control.fetch(
            b"POST",
            target,
            timeout_s=self._config.broadcast_wait_s,
            max_bytes=MAX_CONTROL_BYTES,
            headers=[(b"content-type", b"application/json")] if body else None,
            body=body,
        )
        return Reply(status, text)


def _unloaded(reply: Reply) -> bool:
    return reply.good or reply.status == 404  # it does not know the name


def _adapter(body: bytes) -> tuple[str, str]:
    try:
        document = json.loads(body)
        name, path = document["lora_name"], document.get("lora_path", "")
        if not (isinstance(name, str) and name and isinstance(path, str)):
            raise TypeError("lora_name and lora_path are strings")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(400, ErrorType.BAD_REQUEST, f"not an adapter request: {error!r}") from None
    if document.get("load_inplace"):
        raise ApiError(
            400,
            ErrorType.BAD_REQUEST,
            "load_inplace would put other weights under a name that is in use; load a new name",
        )
    return name, path


def _refusal(what: str, name: str, bad: dict[Replica, Reply]) -> ApiError:
    replica, reply = next(iter(bad.items()))
    text = reply.body[:500].decode(errors="replace")
    status = reply.status if 400 <= reply.status < 600 else 502
    return ApiError(
        status,
        ErrorType.BROADCAST_FAILED,
        f"{what} {name}".strip() + f" failed on {len(bad)} replicas; "
        f"first: {replica.url} answered {reply.status}: {text}",
    )

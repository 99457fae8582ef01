"""Asking the replicas: what they serve, and whether a version is ready.

Owns the client side of ``GET /bucket_lora/status``, against one replica or the proxy. The bucket
stays the source of truth: the question itself makes a replica look there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import requests
from pydantic import BaseModel, ValidationError

from adapter_bucket.errors import BucketError, ConfigError, StoreUnavailable
from adapter_bucket.ready_policy import ReadyPolicy
from adapter_bucket.status import (
    ADAPTER_PARAM,
    MAX_WAIT_S,
    NEED_PARAM,
    STATUS_PATH,
    WAIT_PARAM,
    AdapterStatus,
    FleetStatus,
    ReadyState,
    ReplicaStatus,
)
from trl_async_bucket.server_access import TOKEN_ENV, ServerAccess

_Model = TypeVar("_Model", bound=BaseModel)

LONG_POLL_S = 10.0
"""Length of one status long-poll. Short enough that the publisher notices a stop request."""

_ANSWER_MARGIN_S = 10.0
"""Added to the long-poll's length for the HTTP timeout: the answer itself must travel too."""

RETRY_S = 0.5
"""Shortest time between two status calls, so that a server that answers at once is not hammered."""


class ReplicasRefused(BucketError):
    """The replicas will never serve this version. The message carries their reason."""


class RefusedForNow(ReplicasRefused):
    """They could not fetch or verify it, and still try. It says nothing of the next version."""


def refusal(status: AdapterStatus, said: str) -> ReplicasRefused:
    """The error for an adapter that is refused."""
    return RefusedForNow(said) if status.retried else ReplicasRefused(said)


class Readiness(Protocol):
    """Knows on how many replicas a version is ready."""

    def wait_ready(
        self,
        adapter: str,
        *,
        policy: ReadyPolicy,
        timeout_s: float,
        should_stop: Callable[[], bool],
    ) -> bool:
        """Wait until an adapter is ready on as many replicas as the policy wants.

        Args:
            adapter: Name, ``<run_id>-v<N>``.
            policy: On how many replicas; not ``none``.
            timeout_s: How long to wait in all.
            should_stop: Asked at least every ``LONG_POLL_S``.

        Returns:
            Whether it became ready; false if ``should_stop`` said so first.

        Raises:
            ReplicasRefused: they will never serve it; ``RefusedForNow`` if only this version.
            StoreUnavailable: not ready within ``timeout_s``; the message has the last reason.
        """
        ...


class ReplicaClient:
    """Talks to one replica or to the proxy. Thread-safe."""

    def __init__(self, base_url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        access = ServerAccess.of(base_url)
        self._base_url, self._headers = access.url, access.headers
        self._clock = clock

    def replicas(self) -> dict[str, ReplicaStatus]:
        """Status of every replica that answers, by URL.

        Raises:
            ConfigError: the server does not speak ``/bucket_lora/status``, or wants a token.
            StoreUnavailable: it does not answer, or no replica behind the proxy does.
        """
        body = self._get({}, timeout_s=_ANSWER_MARGIN_S)
        if "replicas" not in body:
            return {self._base_url: _parse(ReplicaStatus, body)}
        fleet = _parse(FleetStatus, body)
        alive = {url: status for url, status in fleet.replicas.items() if status is not None}
        if not alive:
            reasons = "; ".join(f"{url}: {why}" for url, why in fleet.errors.items())
            raise StoreUnavailable(
                f"no replica behind {self._base_url} answers: {reasons or 'none is configured'}"
            )
        return alive

    def wait_ready(
        self,
        adapter: str,
        *,
        policy: ReadyPolicy,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """See ``Readiness``."""
        deadline = self._clock() + timeout_s
        last = "no answer yet"
        while (remaining := deadline - self._clock()) > 0:
            if should_stop():
                return False
            asked = self._clock()
            try:
                status = self._ask(adapter, policy, wait_s=min(remaining, LONG_POLL_S))
            except StoreUnavailable as error:
                last = str(error)
                self._pace(asked, deadline)
                continue
            needed = policy.required(status.replicas)
            if status.state is ReadyState.READY and status.ready_on >= needed:
                return True
            last = f"{status.state} on {status.ready_on}: {status.reason or 'no reason given'}"
            if status.state is ReadyState.REFUSED:
                refused = f"{adapter} is refused by {self._base_url}: {status.reason}"
                raise refusal(status, refused)
            self._pace(asked, deadline)
        raise StoreUnavailable(
            f"{adapter} is not ready at {self._base_url} (bucket_ready={policy}) after "
            f"{timeout_s:.0f} s; last answer: {last}. Check the replicas' logs and that they "
            "watch the same bucket; weight_sync_timeout is the limit"
        )

    def _pace(self, asked: float, deadline: float) -> None:
        """Sleep if an answer came at once, as from a server that is down or does not long-poll."""
        now = self._clock()
        time.sleep(max(min(asked + RETRY_S, deadline) - now, 0.0))

    def _ask(self, adapter: str, policy: ReadyPolicy, *, wait_s: float) -> AdapterStatus:
        wait_s = min(wait_s, MAX_WAIT_S)
        body = self._get(
            {ADAPTER_PARAM: adapter, WAIT_PARAM: f"{wait_s:.3f}", NEED_PARAM: policy.need},
            timeout_s=wait_s + _ANSWER_MARGIN_S,
        )
        status = _parse(AdapterStatus, body.get("adapter"))
        if status.name != adapter:
            raise StoreUnavailable(
                f"{self._base_url} was asked about {adapter} and answered about {status.name[:100]}"
            )
        return status

    def _get(self, params: dict[str, str], *, timeout_s: float) -> dict[str, Any]:
        url = f"{self._base_url}{STATUS_PATH}"
        try:
            # No shared session: requests' sessions are not thread-safe, and this is a call or two
            # a sync.
            response = requests.get(
                url,
                params=params,
                headers=self._headers,
                timeout=(5.0, timeout_s),
                allow_redirects=False,  # the token is for this server only
            )
        except requests.RequestException as error:
            raise StoreUnavailable(f"{url} does not answer: {error}") from error
        if response.status_code == 404:
            raise ConfigError(
                f"{url} answers 404: start vLLM with `--plugin bucket-lora --bucket-lora-url …`, "
                "or put vllm_server_base_url to the bucket-lora-proxy"
            )
        if response.status_code in (401, 403):
            raise ConfigError(f"{url} answers {response.status_code}: set {TOKEN_ENV}")
        if response.status_code != 200:
            raise StoreUnavailable(f"{url} answers {response.status_code}: {response.text[:200]}")
        try:
            body = response.json()
        except requests.JSONDecodeError:
            raise StoreUnavailable(f"{url} does not answer JSON") from None
        return body if isinstance(body, dict) else {}


def _parse(model: type[_Model], body: object) -> _Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise StoreUnavailable(
            f"a status answer is not a {model.__name__}: {error.error_count()} faults"
        ) from None

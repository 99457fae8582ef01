"""Generation for the on-policy ``GRPOTrainer``: every request names the policy version it wants.

Owns the two subclasses that replace TRL's vLLM backend and HTTP client. No process group is made,
no weights are sent, and the trainer's machine needs no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import requests
from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from adapter_bucket.errors import BucketError, ConfigError, StoreUnavailable
from trl_async_bucket.compat.grpo import import_generation
from trl_async_bucket.server_access import ServerAccess

logger = logging.getLogger(__name__)

TrlGeneration: Any
TrlClient: Any
TrlGeneration, TrlClient = import_generation()

CONNECT_S = 10.0
ANSWER_S = 3600.0
"""Longest time for one request, which generates all completions of a step."""

_PASSING = (429, 500, 502, 503, 504)
"""Answers that pass by themselves: no replica has the version yet, or one was lost."""

POOL_SIZE = 64
"""Connections kept: TRL sends up to 64 requests at once for multimodal prompts."""


class WrongVersion(BucketError):
    """A server answered a request with another model than it named."""


class VersionedClient(TrlClient):  # type: ignore[misc]
    """TRL's client, whose requests name one policy version.

    ``model`` is the name that every request carries; ``serve`` sets it. A request that fails in a
    way that may pass is sent again for ``retry_s``: generations have no side effect.

    Args:
        base_url: A replica, or the proxy.
        connect_s: How long to wait for the server to be up, seconds.
        retry_s: How long to try one request, seconds.
    """

    # TRL's constructor is not called: it wants vLLM installed and names the base model.
    def __init__(self, base_url: str, *, connect_s: float, retry_s: float) -> None:
        access = ServerAccess.of(base_url)
        self.base_url = access.url
        self.session = requests.Session()
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=POOL_SIZE)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, adapter)
        self.session.headers.update(access.headers)
        self.model = ""
        self.logprobs_mode = "unknown"
        self._retry_s = retry_s
        self._call("GET", f"{self.base_url}/health", limit_s=connect_s)

    def get_server_info(self) -> dict[str, Any]:
        """What TRL looks at of a server's config; its development endpoint is not asked."""
        return {"model_config": {"logprobs_mode": self.logprobs_mode}}

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._call("GET", url, limit_s=self._retry_s, **kwargs).json()

    def _post(self, url: str, **kwargs: Any) -> Any:
        if not self.model:
            raise ConfigError("nothing is published yet, so there is no version to generate with")
        answer = self._call("POST", url, limit_s=self._retry_s, **kwargs).json()
        served = answer.get("model", self.model) if isinstance(answer, dict) else None
        if served != self.model:
            raise WrongVersion(f"{url} was asked for {self.model} and answered as {served!r}")
        return answer

    def _call(self, method: str, url: str, *, limit_s: float, **kwargs: Any) -> requests.Response:
        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=stop_after_delay(limit_s),
            wait=wait_exponential_jitter(initial=0.5, max=10),
            before_sleep=before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        response: requests.Response = retrying(self._once, method, url, **kwargs)
        return response

    def _once(self, method: str, url: str, **kwargs: Any) -> requests.Response:
        try:
            response = self.session.request(
                method, url, timeout=(CONNECT_S, ANSWER_S), allow_redirects=False, **kwargs
            )
        except requests.RequestException as error:
            raise StoreUnavailable(f"{url} does not answer: {error}") from error
        if response.status_code in _PASSING:
            raise StoreUnavailable(f"{url} answers {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise ConfigError(
                f"{url} answers {response.status_code} to a request for "
                f"{self.model or 'its health'}: {response.text[:500]}"
            )
        return response


class BucketGeneration(TrlGeneration):  # type: ignore[misc]
    """TRL's generation backend, whose ``sync_weights`` publishes to the bucket.

    Args:
        connect: Called on all ranks with the model; makes the client on rank 0, after its checks.
        sync: Called on all ranks; returns the adapter name of the version that is ready now, on
            rank 0, else ``None``.
        kwargs: TRL's arguments.
    """

    def __init__(
        self,
        *,
        connect: Callable[[Any], VersionedClient | None],
        sync: Callable[[], str | None],
        **kwargs: Any,
    ) -> None:
        self._connect = connect
        self._sync = sync
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        self.vllm_client = self._connect(self.model)

    def sync_weights(self) -> None:
        """Publish the policy and generate with it from now on. All ranks."""
        name = self._sync()
        if self.vllm_client is not None and name is not None:
            self.vllm_client.model = name

"""What generations share: who may ask, what a request must look like, and what is in progress."""

from __future__ import annotations

from bucket_lora_proxy.admission import Admission
from bucket_lora_proxy.attempt import Request
from bucket_lora_proxy.auth import Doorkeeper
from bucket_lora_proxy.client import Client
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.errors import ApiError, ErrorType, Headers
from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.generation import Generation
from bucket_lora_proxy.headers import for_upstream
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.outbox import FEW, Outbox
from bucket_lora_proxy.prefix import Hasher
from bucket_lora_proxy.recent_errors import RecentErrors
from bucket_lora_proxy.request_body import check_framing, read_fields
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.watcher import Watcher

GENERATION_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
)
"""POST, routed by the ``model`` field."""


class Forwarder:
    """Begins generations."""

    def __init__(
        self,
        config: ProxyConfig,
        *,
        doorkeeper: Doorkeeper,
        fleet: Fleet,
        admission: Admission,
        router: Router,
        watcher: Watcher,
        metrics: Metrics,
        errors: RecentErrors,
        outbox: Outbox,
    ) -> None:
        self.config = config
        self.outbox = outbox
        self.fleet = fleet
        self.admission = admission
        self.router = router
        self.watcher = watcher
        self.metrics = metrics
        self.running: set[Generation] = set()
        self._doorkeeper = doorkeeper
        self._errors = errors
        self._hasher = Hasher()

    def admit(self, http_version: str, headers: Headers) -> None:
        """Decide by the head of a request whether its body is wanted.

        Raises:
            ApiError: it is not.
        """
        self._doorkeeper.check(headers)
        self._doorkeeper.refuse_other_sites(headers)
        if http_version == "1.0":
            # Its streams end with the connection: a cut one could not be told from a whole one.
            raise ApiError(505, ErrorType.BAD_REQUEST, "generations need HTTP/1.1")
        check_framing(headers, max_bytes=self.config.max_body_bytes)

    def begin(self, client: Client, path: str, headers: Headers, body: bytes) -> Generation:
        """Take on a whole request; the client hears of the rest, maybe before this returns.

        Raises:
            ApiError: the body is no request.
        """
        fields = read_fields(body)
        prompt = self._hasher.prompt(*fields)
        request = Request(path.encode(), for_upstream(headers), body, fields.model, prompt)
        generation = Generation(self, client, request)
        self.running.add(generation)
        self.outbox.gathers = len(self.running) > FEW
        generation.start()
        return generation

    def remember(self, error: ApiError) -> None:
        """Show it on the status page, unless it is the client's doing."""
        self._errors.remember(error)

    def stop(self) -> None:
        """End all that is in progress."""
        for generation in list(self.running):
            generation.stop()

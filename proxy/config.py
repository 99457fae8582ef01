"""Every setting of the proxy: one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bucket_lora_proxy.membership.rule import AllowRule
from bucket_lora_proxy.upstream import Origin


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """Effective settings. Tokens are left out of the representation."""

    replicas: tuple[Origin, ...] = ()
    """Members from the start, for good."""
    bucket: str | None = None
    """URL of a bucket whose heartbeats name further members."""
    bucket_runs: tuple[str, ...] = ()
    """Runs whose heartbeats count; empty: all."""
    allow_replicas: tuple[AllowRule, ...] = ()
    """Which addresses in a bucket may become members; empty: none."""
    bucket_poll_s: float = 5.0
    """Pause between two looks at the heartbeats. A poll lists the runs; a replica takes far longer
    to start."""
    max_replicas: int = 64
    """Members at most; the rest of what a bucket names is left out."""
    slow_start_s: float = 10.0
    """How long a replica that (re)joins is held below its share."""
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    dev_cert: Path | None = None
    """Folder of a self-signed certificate that the proxy makes itself."""
    client_ca: Path | None = None
    """Clients must show a certificate of these authorities; none: they need not."""
    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Accepted tokens, several for rotation; empty: no token is asked for."""
    replica_token: str | None = field(default=None, repr=False)
    """Token for replicas that have none of their own."""
    replica_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Own tokens of static replicas, by URL."""
    replica_ca: Path | None = None
    """Certificate authorities of the replicas; default: the system's."""
    replica_cert: Path | None = None
    replica_key: Path | None = None
    """What replicas are shown that ask for a client certificate."""
    insecure_public_bind: bool = False
    allow_broadcast: bool = False
    """Pass the state-changing calls of stock TRL on to all replicas. Off: they let a client name
    any path on a replica."""
    broadcast_wait_s: float = 120.0
    """How long one such call may take, and how long a mount may lag behind the trainer."""
    pause_lease_s: float = 600.0
    """Time after which a paused fleet is resumed by itself: above TRL's own limits for a sync."""
    adapter_wait_s: float = 30.0
    """How long a generation waits for its adapter; covers publish to ready several times over."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body: 100,000 token ids are below 1 MiB, base64 images may need more."""
    max_answer_bytes: int = 256 * 1024 * 1024
    """Largest non-streamed answer; logprobs of long completions are the large case."""
    body_timeout_s: float = 60.0
    """Longest time a client may take to send a request body."""
    response_timeout_s: float = 1800.0
    """Longest silence of a replica inside a generation. Above TRL's own request limit, so that
    the trainer gives up first and its log says so."""
    connect_timeout_s: float = 5.0
    control_timeout_s: float = 5.0
    """Limit of a status, health or model-list call."""
    poll_s: float = 0.25
    """Pause between two status calls to a replica: how long a change can go unseen."""
    unresponsive_s: float = 15.0
    """How long a replica may fail its status calls before its unanswered requests go elsewhere."""
    keep_alive_s: float = 4.0
    """Idle connections are reused up to this age; vLLM closes them at 5 s."""
    max_connections: int = 1024
    """Connections for generations to one replica: above vLLM's default of 256 running requests."""
    max_attempts: int = 3
    """Replicas that are asked for one generation before it fails."""
    min_healthy: int = 1
    """Healthy replicas from which ``/health`` answers 200."""
    shutdown_s: float = 30.0
    """How long running requests may take to finish after SIGTERM."""

    @property
    def serves_tls(self) -> bool:
        """Whether clients speak TLS to it."""
        return self.tls_cert is not None or self.dev_cert is not None

    def token_of(self, origin: Origin) -> str | None:
        """The token that this replica is sent."""
        return self.replica_tokens.get(origin.url, self.replica_token)

"""What is known of a generation while one replica is asked. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bucket_lora_proxy.errors import Headers
from bucket_lora_proxy.exchange import Exchange
from bucket_lora_proxy.prefix import Prompt
from bucket_lora_proxy.replicas import Replica
from bucket_lora_proxy.router import Choice


class Request(NamedTuple):
    """What a client asks for."""

    target: bytes
    headers: Headers
    """Those that a replica may see."""
    body: bytes
    model: str | None
    prompt: Prompt


@dataclass(slots=True, eq=False)
class Attempt:
    """One replica is asked."""

    choice: Choice[Replica]
    exchange: Exchange
    last: bool
    """Its answer is passed on even if it is busy: there is no other to ask."""
    asked: float
    """When; by ``time.perf_counter``, as ``headed``."""
    work: float = 0.0
    """What it added to the replica's outstanding work."""
    trial: int = 0
    """Its number, if the replica's breaker is open and this request tries it; else 0."""
    headed: float = 0.0
    status: int = 0
    """Of the answer; 0 before its head is there."""
    streaming: bool = False
    """The answer is passed on as it comes; any other is collected first."""
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def replica(self) -> Replica:
        return self.choice.replica

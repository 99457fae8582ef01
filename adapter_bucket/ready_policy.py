"""On how many replicas a version must be ready before rollouts ask for it. Pure.

The trainer's config writes a policy (``any``, ``all``, ``quorum:N``, ``none``); the status
long-poll carries it as ``need`` (``any``, ``all`` or a number); the proxy and readers of heartbeats
decide by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapter_bucket.errors import ConfigError

MAX_QUORUM = 4096
"""More replicas than this are not counted anywhere."""

_NEEDS = ("any", "all")


@dataclass(frozen=True)
class ReadyPolicy:
    """How many replicas must have a version ready."""

    kind: str
    """``any``, ``all``, ``quorum`` or ``none``."""
    count: int = 0
    """The N of ``quorum``."""

    @classmethod
    def parse(cls, text: str) -> ReadyPolicy:
        """Read a policy as a config writes it.

        Raises:
            ConfigError: it is none of the four forms.
        """
        if text in (*_NEEDS, "none"):
            return cls(text)
        kind, _, digits = text.partition(":")
        if kind == "quorum" and (count := _count(digits)):
            return cls("quorum", count)
        raise ConfigError(
            f"bucket_ready={text[:50]!r} is not 'any', 'all', 'none', or 'quorum:N' with N from 1 "
            f"to {MAX_QUORUM}"
        )

    @classmethod
    def from_need(cls, need: str) -> ReadyPolicy:
        """Read the ``need`` of a status request.

        Raises:
            ConfigError: it is neither ``any`` nor ``all`` nor a number.
        """
        if need in _NEEDS:
            return cls(need)
        if count := _count(need):
            return cls("quorum", count)
        raise ConfigError(f"need={need[:50]!r} is not any, all, or a number up to {MAX_QUORUM}")

    @property
    def need(self) -> str:
        """The value of ``need`` in a status request. ``none`` asks nothing and has no such form."""
        return str(self.count) if self.kind == "quorum" else self.kind

    def required(self, replicas: int) -> int:
        """On how many of ``replicas`` (those that answer) the version must be ready."""
        return {"any": 1, "all": max(replicas, 1), "none": 0}.get(self.kind, self.count)

    def __str__(self) -> str:
        return f"quorum:{self.count}" if self.kind == "quorum" else self.kind


def _count(digits: str) -> int:
    """A number from 1 to ``MAX_QUORUM``; 0 if it is none."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 4):
        return 0
    value = int(digits)
    return value if value <= MAX_QUORUM else 0


ANY = ReadyPolicy("any")
ALL = ReadyPolicy("all")

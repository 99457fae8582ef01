"""What ``bucket-lora top`` takes from a proxy's ``/metrics``."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError, StoreUnavailable

TOKEN_ENV = "BUCKET_LORA_TOKEN"
"""The same as the trainer's: a bearer token for the proxy, if it asks for one."""

TIMEOUT_S = 5.0
MAX_BYTES = 16 * 1024**2
_PREFIX = "bucket_lora_proxy_"
_LINE = re.compile(rf"{_PREFIX}(?P<name>\w+)(?:\{{(?P<labels>.*)\}})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class ProxySample:
    """One reading of the metrics."""

    taken_at: float
    """``time.monotonic``, seconds."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)
    """By name without prefix, then by labels."""

    def total(self, name: str) -> float:
        """Sum over all labels; 0 for a metric that is not there."""
        return sum(self.values.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.values.get(name, {}).items():
            sums[dict(labels).get(label, "")] += value
        return dict(sums)


def read_proxy(url: str) -> ProxySample:
    """Ask the proxy at ``url`` for its metrics.

    Raises:
        ConfigError: the address is none, or the proxy wants a token.
        StoreUnavailable: it does not answer, or something else does.
    """
    target = f"{_checked(url)}/metrics"
    request = urllib.request.Request(target)
    if token := os.environ.get(TOKEN_ENV, ""):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                raise ConfigError(f"{target} answers {error.code}: set {TOKEN_ENV}") from None
            raise StoreUnavailable(f"{target} answers {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StoreUnavailable(f"{target} does not answer: {error}") from None
    values = parse_metrics(text)
    if "members" not in values:
        raise StoreUnavailable(f"{target} has no metrics of a bucket-lora-proxy")
    return ProxySample(time.monotonic(), values)


def parse_metrics(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The proxy's own metrics in a Prometheus exposition; every other line is passed over."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        found[match["name"]][tuple(sorted(_LABEL.findall(match["labels"] or "")))] = value
    return dict(found)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--proxy {url[:100]!r} is not http(s)://host[:port]")
    if parts.username is not None:
        raise ConfigError(f"--proxy holds a login; give the token as {TOKEN_ENV} instead")
    return url.rstrip("/")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is meant for the address that was given."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)

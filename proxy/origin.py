"""Where a replica listens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a replica listens."""

    url: str
    host: str
    port: int
    tls: bool
    authority: bytes
    """Value of the Host field."""
    base_path: bytes
    """Prefix of every path, without a trailing slash; usually empty."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read ``http(s)://host[:port][/prefix]``.

        Raises:
            ConfigError: any other form; credentials in a URL are refused because URLs are logged.
        """
        if any("@" in part for part in url.split("/", 3)[:3]):  # first: other errors show the URL
            raise ConfigError(
                "a replica URL holds credentials; give them as --replica-token-file instead"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"replica URL {url!r} is not valid: {error}") from error
        wrong_parts = parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or wrong_parts:
            raise ConfigError(f"replica URL {url!r} is not http(s)://host[:port][/prefix]")
        if not url.isascii() or any(character <= " " for character in url):
            raise ConfigError(f"replica URL {url!r} holds characters other than printable ASCII")
        tls = parts.scheme == "https"
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port or (443 if tls else 80),
            tls=tls,
            authority=parts.netloc.encode(),
            base_path=parts.path.rstrip("/").encode(),
        )

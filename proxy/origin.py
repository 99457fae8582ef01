"""Where a replica listens. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a replica listens."""

    url: str
    """In one spelling, so that two of one address are seen to be one replica: scheme and host in
    lower case, no dot behind a name, IPv6 as short as can be, no port that is the scheme's own."""
    host: str
    """What is resolved: with the dot behind a name, which keeps a resolver's search list out."""
    port: int
    tls: bool
    authority: bytes
    """Value of the Host field."""
    base_path: bytes
    """Prefix of every path, without a trailing slash; usually empty."""

    @property
    def tls_name(self) -> str:
        """What the certificate has to name."""
        return self.host.removesuffix(".")

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
            given_port = parts.port
        except ValueError as error:
            raise ConfigError(f"replica URL {url!r} is not valid: {error}") from error
        host = _one_spelling(parts.hostname or "")
        name = host.removesuffix(".")
        if parts.scheme not in ("http", "https") or not name or parts.query or parts.fragment:
            raise ConfigError(f"replica URL {url!r} is not http(s)://host[:port][/prefix]")
        if given_port == 0:
            raise ConfigError(f"replica URL {url!r} names port 0; use 1 to 65535")
        if not url.isascii() or any(character <= " " for character in url):
            raise ConfigError(f"replica URL {url!r} holds characters other than printable ASCII")
        usual = 443 if parts.scheme == "https" else 80
        port = given_port or usual
        authority = f"[{name}]" if ":" in name else name
        if port != usual:
            authority += f":{port}"
        path = parts.path.rstrip("/")
        return cls(
            url=f"{parts.scheme}://{authority}{path}",
            host=host,
            port=port,
            tls=parts.scheme == "https",
            authority=authority.encode(),
            base_path=path.encode(),
        )


def _one_spelling(host: str) -> str:
    """An IP address in its usual form; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host

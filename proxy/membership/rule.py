"""Which addresses that stand in a bucket may become replicas. Pure.

Whoever can write to the bucket can write an address there, and the proxy sends prompts and a token
to its replicas. So an address is used only if the operator has allowed it by a pattern; without a
pattern none is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.upstream import Origin

_PATTERN = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._*-]+)"
    r"(?:/(?P<bits>\d{1,3}))?(?::(?P<port>\d{1,5}|\*))?\Z"
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?\Z")
_NO_NAME = re.compile(r"[0-9.*]+\Z")

_EXAMPLES = "'https://*.example.org', 'https://job-*.example.org:8000', 'http://10.0.0.0/8:8000'"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class AllowRule:
    """One pattern: ``scheme://host[:port]``.

    The host is a name, in which ``*`` stands for letters, digits and ``-`` (a leading ``*.`` for
    any number of labels), or an IP address or network; neither matches the other kind. The port is
    the scheme's own if none is given; ``*`` is any.
    """

    pattern: str
    tls: bool
    port: int | None
    """``None``: any."""
    network: _Network | None = None
    name: re.Pattern[str] | None = None
    token: str | None = field(default=None, repr=False)
    """Token for the replicas that this pattern allows; default: that of all replicas."""

    @classmethod
    def parse(cls, pattern: str, *, token: str | None = None) -> AllowRule:
        """Read a pattern.

        Raises:
            ConfigError: it is none, or it would allow every host.
        """
        match = _PATTERN.match(pattern)
        if match is None:
            raise ConfigError(f"--allow-replica {pattern!r} is no pattern like {_EXAMPLES}")
        tls = match["scheme"] == "https"
        host, port = match["host"].lower(), match["port"]
        number = None if port == "*" else int(port or (443 if tls else 80))
        if number is not None and not 0 < number < 65536:
            raise ConfigError(f"--allow-replica {pattern!r} names port {number}; use 1 to 65535")
        network = _network(pattern, host, match["bits"])
        name = None if network else _compiled(pattern, host)
        return cls(pattern, tls, number, network, name, token)

    def allows(self, origin: Origin) -> bool:
        """Whether this address may be used."""
        if origin.tls != self.tls or self.port not in (None, origin.port):
            return False
        address = _address(origin.host)
        if address is not None:
            return self.network is not None and address in self.network
        return self.name is not None and self.name.match(origin.host) is not None


def origin_of(url: str, rules: Sequence[AllowRule]) -> tuple[Origin, AllowRule]:
    """The address that a bucket names, and the first rule that allows it.

    Raises:
        ConfigError: it is no plain ``http(s)://host[:port]``, or no rule allows it.
    """
    origin = Origin.parse(url)
    if origin.base_path:
        raise ConfigError("its address has a path; scheme, host and port alone are taken")
    if _address(origin.host) is None and not _NAME.match(origin.host):
        raise ConfigError("its address has no plain host name")
    for rule in rules:
        if rule.allows(origin):
            return origin, rule
    raise ConfigError("no --allow-replica pattern allows its address")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(pattern: str, host: str, bits: str | None) -> _Network | None:
    address = _address(host.strip("[]"))
    if address is None:
        if bits is not None or host.startswith("["):
            raise ConfigError(f"--allow-replica {pattern!r}: {host} is no IP address")
        return None
    try:
        network = ipaddress.ip_network(f"{address}/{bits or address.max_prefixlen}")
    except ValueError as error:
        raise ConfigError(f"--allow-replica {pattern!r}: {error}") from None
    if network.prefixlen == 0:
        raise ConfigError(f"--allow-replica {pattern!r} would allow every host; name a network")
    return network


def _compiled(pattern: str, host: str) -> re.Pattern[str]:
    if _NO_NAME.match(host):
        raise ConfigError(
            f"--allow-replica {pattern!r} would allow every host or is half an IP address; "
            f"use a domain or a network, like {_EXAMPLES}"
        )
    prefix = ""
    if host.startswith("*."):
        prefix, host = r"(?:[a-z0-9-]+\.)+", host[2:]
    return re.compile(prefix + re.escape(host).replace(r"\*", "[a-z0-9-]+") + r"\Z")

"""How the trainer proves itself to the proxy or to a replica.

One token, from ``BUCKET_LORA_TOKEN`` or from a login in the server's address, for every request:
our own, and those of TRL's clients, which know no other way than the address.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from adapter_bucket.errors import ConfigError
from adapter_bucket.json_logs import hide_logins

TOKEN_ENV = "BUCKET_LORA_TOKEN"
"""Bearer token for the proxy or the replica, if it asks for one."""


@dataclass(frozen=True)
class ServerAccess:
    """A server's address and what to show it."""

    url: str
    """Without a login and trailing slash; may be logged."""
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, address: str) -> ServerAccess:
        """From the address in the trainer's arguments. The variable wins over a login in it.

        Raises:
            ConfigError: the token cannot stand in a header.
        """
        parts = urlsplit(address)
        token = os.environ.get(TOKEN_ENV, "").strip() or unquote(parts.password or "")
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"{TOKEN_ENV} must be printable ASCII without spaces (value not shown)"
            )
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return cls(plain.rstrip("/"), token)

    @property
    def headers(self) -> Mapping[str, str]:
        """For our own requests."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def login_url(self) -> str:
        """For clients that take nothing but an address: it must not be shown."""
        if not self.token:
            return self.url
        parts = urlsplit(self.url)
        login = f"token:{quote(self.token, safe='')}@"
        return parts._replace(netloc=login + parts.netloc).geturl()


class HideLogins(logging.Filter):
    """Takes logins out of the addresses in another library's log lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the line; it is always let through."""
        record.msg, record.args = hide_logins(record.getMessage()), None
        return True


def give_access(trl_client: Any, access: ServerAccess) -> None:
    """Let TRL's client of the asynchronous trainer prove itself, and keep its log clean."""
    trl_client.server_url = access.login_url
    logging.getLogger(type(trl_client).__module__).addFilter(HideLogins())

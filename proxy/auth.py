"""Tokens of clients: read, compared in constant time, never shown.

A token comes as a bearer, or as the password of Basic authentication with any user name: so
browsers can log in, and clients that only take a URL can carry it as ``https://x:TOKEN@host``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.errors import ApiError, ErrorType

MIN_TOKEN_LENGTH = 16
"""Shorter tokens are refused: they can be guessed through a public port."""


def read_tokens(path: Path) -> tuple[str, ...]:
    """Read one token a line; blank lines and lines that start with ``#`` are skipped.

    Raises:
        ConfigError: unreadable, empty, or a token that cannot stand in a header field. The message
            names the file and the line, never the token.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read as ASCII text: {error}") from None
    tokens = []
    for number, line in enumerate(lines, start=1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        check_token(token, f"line {number} of token file {path}")
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"token file {path} holds no token; put one on a line of its own")
    return tuple(tokens)


def check_token(token: str, where: str) -> None:
    """Refuse a token that is short or cannot stand in a header field.

    Raises:
        ConfigError: names ``where`` it stands, never the token.
    """
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"the token in {where} has {len(token)} characters; use at least {MIN_TOKEN_LENGTH}"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"the token in {where} holds a space or an unprintable character")


class Doorkeeper:
    """Lets a request in if it carries one of the tokens; with no tokens, everybody.

    Every token is compared, over digests of equal length, so that the time taken says neither
    which token matched nor how much of one.
    """

    def __init__(self, tokens: Iterable[str], *, serves_tls: bool = False) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]
        self._any_name = bool(self._digests) or serves_tls
        """Whether browsers may call this server by any name: another site can give its own name
        this address, but has no login here under that name, and no certificate for it.
        """

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Let the request pass, or raise.

        Args:
            headers: the request's fields, names in lower case.

        Raises:
            ApiError: 401; the message is the same for a missing and for a wrong token.
        """
        if not self._digests:
            return
        given = [value for name, value in headers if name == b"authorization"]
        token = _token(given[0]) if len(given) == 1 else None
        if token is not None:
            digest = _digest(token)
            if sum(hmac.compare_digest(digest, known) for known in self._digests):
                return
        raise ApiError(
            401,
            ErrorType.UNAUTHORIZED,
            "a valid token is required: send 'Authorization: Bearer <token>', or the token as "
            "password of Basic authentication",
        )

    def refuse_other_sites(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a call that a browser makes for the page of another site.

        A browser that has logged in, or that runs beside a proxy without a token, would send it for
        any page that its user visits.

        Raises:
            ApiError: 403.
        """
        host = origin = None
        for name, value in headers:
            if name == b"origin":
                origin = value
            elif name == b"host":
                host = value
        if origin is None:
            return
        if origin.partition(b"://")[2] != host or not (self._any_name or _is_fixed(host)):
            raise ApiError(
                403,
                ErrorType.ROUTE_FORBIDDEN,
                "the call comes from the page of another site (its Origin is not this host, or is "
                "a name that any site can give this address; use localhost or the address)",
            )


def _is_fixed(host: bytes) -> bool:
    """Whether no other site can choose what this stands for: an address, or this machine."""
    try:
        name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _token(value: bytes) -> bytes | None:
    """The token in an ``Authorization`` field."""
    scheme, _, rest = value.partition(b" ")
    scheme, rest = scheme.lower(), rest.strip()
    if scheme == b"bearer":
        return rest
    if scheme == b"basic":
        try:
            _, colon, password = base64.b64decode(rest, validate=True).partition(b":")
        except ValueError:
            return None
        return password if colon else None
    return None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()

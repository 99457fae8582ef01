"""Optional signature of the manifest: HMAC-SHA256 with a shared key, a key id, and rotation.

Whoever can write to the bucket can replace an adapter *and* its digest. With keys configured, a
reader believes only a manifest that somebody with a key wrote; the digests in it then vouch for the
files.

The signature covers the document's own bytes, not a canonical form: the 64 hexadecimal digits of
``signature.hmac_sha256`` are replaced by 64 zeros, and the HMAC of ``DOMAIN`` followed by the
result is those digits. They must occur once in the document.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from adapter_bucket.errors import ConfigError, IntegrityError

KEYS_VARIABLE = "BUCKET_LORA_SIGNING_KEYS"
"""``id:hex,id:hex…``: the first key signs, every key verifies. To rotate, add the new key behind
the old one everywhere, then move it to the front at the writer, then drop the old one."""

DOMAIN = b"bucket-lora manifest v1\n"
"""Keeps a signature made for something else with the same key from fitting here."""

BLANK = "0" * 64
MIN_KEY_BYTES = 16

_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


@dataclass(frozen=True)
class SigningKeys:
    """Keys by id, the signing one first. Empty: nothing is signed, and signatures are ignored."""

    keys: tuple[tuple[str, bytes], ...] = ()

    def __repr__(self) -> str:
        """Ids only."""
        return f"SigningKeys({', '.join(key_id for key_id, _ in self.keys)})"

    def __bool__(self) -> bool:
        return bool(self.keys)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> SigningKeys:
        """Read ``BUCKET_LORA_SIGNING_KEYS``.

        Raises:
            ConfigError: it is malformed. No key material is shown.
        """
        return cls.parse(environment.get(KEYS_VARIABLE, ""))

    @classmethod
    def parse(cls, text: str) -> SigningKeys:
        """Read ``id:hex,id:hex…``; empty text is no keys.

        Raises:
            ConfigError: a part is malformed, too short, or its id occurs twice.
        """
        keys: dict[str, bytes] = {}
        for number, part in enumerate(filter(None, text.split(",")), start=1):
            key_id, _, digits = part.strip().partition(":")
            try:
                key = bytes.fromhex(digits)
            except ValueError:
                key = b""
            if not _KEY_ID.match(key_id) or len(key) < MIN_KEY_BYTES or key_id in keys:
                raise ConfigError(
                    f"{KEYS_VARIABLE}: part {number} is not <id>:<hex> with an id of its own and "
                    f"at least {2 * MIN_KEY_BYTES} hexadecimal digits"
                )
            keys[key_id] = key
        return cls(tuple(keys.items()))

    @property
    def signing_id(self) -> str:
        """Id of the key that signs."""
        return self.keys[0][0]

    def sign(self, document: bytes) -> bytes:
        """Fill in the signature of a document whose digits are still blank.

        Args:
            document: Holds 64 zeros as its ``hmac_sha256``, behind any other 64 zeros.
        """
        at = document.rindex(BLANK.encode())
        digits = _hmac(self.keys[0][1], document).encode()
        return document[:at] + digits + document[at + len(BLANK) :]

    def verify(self, document: bytes, *, key_id: str | None, digits: str | None) -> None:
        """Check a signature.

        Args:
            document: The bytes as they were read.
            key_id: ``signature.key_id`` in them, or ``None`` if unsigned.
            digits: ``signature.hmac_sha256`` in them.

        Raises:
            IntegrityError: unsigned, signed with an unknown key, or changed after signing.
        """
        if key_id is None or digits is None:
            raise IntegrityError(
                f"the manifest is not signed, and {KEYS_VARIABLE} is set; set the same keys at the "
                "writer"
            )
        key = dict(self.keys).get(key_id)
        if key is None:
            raise IntegrityError(
                f"the manifest is signed with key {key_id[:64]!r}, known here are "
                f"{', '.join(name for name, _ in self.keys)}"
            )
        if document.count(digits.encode()) != 1 or not hmac.compare_digest(
            _hmac(key, document.replace(digits.encode(), BLANK.encode())), digits
        ):
            raise IntegrityError(
                f"the manifest does not match its signature with key {key_id!r}: it was changed "
                "by somebody without the key, or the keys differ"
            )


def _hmac(key: bytes, document: bytes) -> str:
    return hmac.new(key, DOMAIN + document, hashlib.sha256).hexdigest()

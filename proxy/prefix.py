"""Prompts as chains of block hashes, as a replica's prefix cache sees them. Pure but for a memo.

A block is 64 bytes: 16 token ids of four bytes each, or 64 bytes of text, which is 16 tokens by
the usual four bytes a token. Each hash covers its block and, as seed, the hash before it; the first
seed is the model's name, because adapters do not share cache blocks. So an equal hash means an
equal prefix under an equal name.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import cast

import xxhash
from bucket_lora_proxy.request_body import read_content
from pydantic_core import to_json

BLOCK_TOKENS = 16
BLOCK_BYTES = 64

MAX_HASHED_BYTES = 1024 * 1024
"""Only so much of a prompt is hashed: 262,144 tokens, or an image in a chat message."""

MAX_MEMO = 1024
"""Prompts whose chain is remembered: the groups in flight several times over. A chain of 2,048
tokens takes 5 KiB."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing needs to know of a request."""

    name: str
    """Model it names; "" for none."""
    tokens: int
    """Prompt length; estimated for text."""
    decode_tokens: int
    """Tokens it may produce, over all its completions."""
    chains: tuple[tuple[int, ...], ...] = ()
    """Block hashes of each of its prompts; more than one for a batched request."""


class Hasher:
    """Turns prompts into chains; remembers the last ones, because a group repeats its prompt."""

    def __init__(self) -> None:
        self._memo: dict[int, tuple[int, tuple[tuple[int, ...], ...]]] = {}

    def prompt(self, name: str | None, content_json: bytes, decode_tokens: int) -> Prompt:
        """Describe a request.

        Args:
            name: the model it names.
            content_json: its ``prompt`` (token ids, text, or a list of either), or a list of chat
                messages, as JSON: a prompt that is remembered is not even parsed. Anything else
                has no chain, and is left to the replica to refuse.
            decode_tokens: tokens it may produce.

        Raises:
            ApiError: 400, it is not JSON.
        """
        name = name or ""
        seed = xxhash.xxh3_64_intdigest(name.encode())
        key = xxhash.xxh3_64_intdigest(content_json, seed)
        known = self._memo.get(key)
        if known is None:
            pieces = _pieces(read_content(content_json))
            chains = tuple(chain_of(seed, piece[:MAX_HASHED_BYTES]) for piece in pieces)
            known = sum(len(piece) for piece in pieces) // 4, chains
            if len(self._memo) >= MAX_MEMO:
                del self._memo[next(iter(self._memo))]
            self._memo[key] = known
        return Prompt(name, known[0], decode_tokens, known[1])


def chain_of(seed: int, data: bytes) -> tuple[int, ...]:
    """Hashes of the whole blocks of ``data``; a last, partial block is never cached."""
    digest = xxhash.xxh3_64_intdigest
    hashes = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        seed = digest(data[start : start + BLOCK_BYTES], seed)
        hashes.append(seed)
    return tuple(hashes)


def _pieces(content: object) -> list[bytes]:
    if isinstance(content, str):
        return [content.encode()]
    if not isinstance(content, list) or not content:
        return []
    first = content[0]
    if isinstance(first, int):
        return [_token_bytes(content)]
    if isinstance(first, str):
        return [item.encode() for item in content if isinstance(item, str)]
    if isinstance(first, list):
        return [_token_bytes(item) for item in content if isinstance(item, list)]
    # Chat messages: a later turn begins with the same bytes, but for the closing bracket.
    return [to_json(content)[:-1]]


def _token_bytes(ids: list[object]) -> bytes:
    try:
        return array("i", cast(list[int], ids)).tobytes()
    except (TypeError, OverflowError):
        return b""

"""Prompts as chains of block hashes, as a replica's prefix cache sees them. Pure but for a memo.

A block is 16 token ids, as they are written in the request, or 64 bytes of text, which is 16 tokens
by the usual four bytes a token. Each hash covers its block and, as seed, the hash before it; the
first seed is the model's name, because adapters do not share cache blocks. So an equal hash means
an equal prefix under an equal name. (An equal prefix that is spaced otherwise has another hash:
clients that write their JSON differently do not share what is cached.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash
from pydantic_core import to_json

from bucket_lora_proxy.request_body import read_content

BLOCK_TOKENS = 16
BLOCK_BYTES = 64

MAX_HASHED_BYTES = 1024 * 1024
"""Only so much of a text is hashed: 262,144 tokens, or an image in a chat message."""

MAX_HASHED_BLOCKS = MAX_HASHED_BYTES // BLOCK_BYTES
"""Of a list of token ids, as many tokens."""

_IDS = re.compile(rb"\[\s*-?\d")
_BATCH = re.compile(rb"\[\s*\[")
_BLOCK_OF_IDS = re.compile(rb"[^,]*+," * BLOCK_TOKENS)  # a count would take a third longer
_MAX_BLOCK_BYTES = BLOCK_TOKENS * 16

MAX_MEMO = 1024
"""Prompts whose chain is remembered: the groups in flight several times over. A chain of 2,048
tokens takes 5 KiB."""

MAX_MEMO_BLOCKS = 1024 * 1024
"""Blocks of all of them together, 40 MiB: prompts of 128,000 tokens would take 340 MiB without."""


class Prompt(NamedTuple):
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
        self._blocks = 0
        """In all chains that are remembered."""

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
            known = _described(seed, content_json)
            self._memo[key] = known
            self._blocks += _length(known[1])
            while self._blocks > MAX_MEMO_BLOCKS or len(self._memo) > MAX_MEMO:
                self._blocks -= _length(self._memo.pop(next(iter(self._memo)))[1])
        return Prompt(name, known[0], decode_tokens, known[1])


def _length(chains: tuple[tuple[int, ...], ...]) -> int:
    """In blocks, at least one for each chain: an empty one takes memory too."""
    return sum(len(chain) + 1 for chain in chains)


def _described(seed: int, content_json: bytes) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Length in tokens, and chains. Token ids stay text: to build them takes four times as long."""
    if _IDS.match(content_json):
        lists = [content_json]
    elif _BATCH.match(content_json):
        try:
            lists = [bytes(raw) for raw in _LISTS.decode(content_json)]
        except msgspec.DecodeError:  # a NaN somewhere: the replica will say so
            lists = []
    else:
        pieces = _pieces(read_content(content_json))
        chains = tuple(_chain(seed, _blocks_of_text(piece)) for piece in pieces)
        return sum(len(piece) for piece in pieces) // 4, chains
    split = [_split(ids) for ids in lists if _IDS.match(ids)]
    chains = tuple(_chain(seed, blocks) for _, blocks in split)
    return sum(tokens for tokens, _ in split), chains


_LISTS = msgspec.json.Decoder(list[msgspec.Raw])


def _chain(seed: int, blocks: Iterable[bytes]) -> tuple[int, ...]:
    digest = xxhash.xxh3_64_intdigest
    hashes = []
    for block in blocks:
        seed = digest(block, seed)
        hashes.append(seed)
    return tuple(hashes)


def _split(ids: bytes) -> tuple[int, list[bytes]]:
    """Length in tokens, and whole blocks; a last, partial one is never cached."""
    text = ids[1:-1] + b","
    blocks: list[bytes] = _BLOCK_OF_IDS.findall(text, 0, MAX_HASHED_BLOCKS * _MAX_BLOCK_BYTES)
    del blocks[MAX_HASHED_BLOCKS:]
    rest = sum(map(len, blocks))
    return len(blocks) * BLOCK_TOKENS + text.count(b",", rest), blocks


def _blocks_of_text(text: bytes) -> Iterable[bytes]:
    end = min(len(text), MAX_HASHED_BYTES) - BLOCK_BYTES + 1
    return (text[start : start + BLOCK_BYTES] for start in range(0, end, BLOCK_BYTES))


def _pieces(content: object) -> list[bytes]:
    if isinstance(content, str):
        return [content.encode()]
    if not isinstance(content, list) or not content:
        return []
    first = content[0]
    if isinstance(first, str):
        return [item.encode() for item in content if isinstance(item, str)]
    if isinstance(first, dict):
        # Chat messages: a later turn begins with the same bytes, but for the closing bracket.
        return [to_json(content)[:-1]]
    return []

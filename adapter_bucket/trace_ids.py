"""Ids of a version's trace, made from its name. Pure.

A sync runs through processes that share nothing but the bucket. Its trace has one id because every
process makes the same one from the version's name, which stands for one sync for ever. Nothing
travels, and nothing that was read becomes part of a header.
"""

from __future__ import annotations

import hashlib


def trace_id(adapter: str) -> str:
    """W3C trace id of the sync of the version with this name, 32 hexadecimal digits."""
    return _digits(f"bucket-lora trace v1\n{adapter}", 32)


def root_span_id(adapter: str) -> str:
    """Span id of the whole sync, 16 hexadecimal digits: the parent of all its parts."""
    return _digits(f"bucket-lora root span v1\n{adapter}", 16)


def _digits(text: str, count: int) -> str:
    # All zeros would be invalid ids; that SHA-256 begins with 64 zero bits is not to be expected.
    return hashlib.sha256(text.encode()).hexdigest()[:count]

"""How much of a local file is handled at a time, and its digest.

A replica fetches, and a trainer uploads, in a thread beside a loop that is busy in Python. Every
piece costs that thread a wait for the interpreter lock, 5 ms each (``sys.getswitchinterval``) as
long as the loop does not stop by itself. ``benchmarks.fetch_beside_a_loop`` measures it.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

PIECE_BYTES = 16 * 1024 * 1024


def sha256_of(file: BinaryIO) -> str:
    """SHA-256 of the rest of an open file, hexadecimal. Takes ``PIECE_BYTES`` of memory at most."""
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()

"""A local file that is read piece by piece, as large uploads need it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from adapter_bucket.errors import IntegrityError
from adapter_bucket.pieces import PIECE_BYTES


class FileSlices:
    """A file that is sliced like a ``memoryview``, but read only when a slice is taken.

    Not a memory map: a file that is cut short while it is mapped kills the process with SIGBUS,
    and a trainer may write a checkpoint of the same name again. Safe to slice from several threads.

    Args:
        path: The file.
        size: Bytes it must have.

    Raises:
        IntegrityError: it has another size; also from a slice, if it was cut meanwhile.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        actual = os.fstat(self._handle).st_size
        if actual != size:
            self.close()
            raise IntegrityError(f"{path} has {actual} bytes, {size} were expected")

    def __enter__(self) -> FileSlices:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> bytes:
        start, stop, _ = wanted.indices(self._size)
        pieces, at = [], start
        while at < stop:
            piece = os.pread(self._handle, stop - at, at)
            if not piece:
                raise IntegrityError(f"{self._path} ended at byte {at} of {self._size}: it was cut")
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def chunks(self) -> Iterator[bytes]:
        """The whole content, ``PIECE_BYTES`` at a time."""
        for start in range(0, self._size, PIECE_BYTES):
            yield self[start : start + PIECE_BYTES]


Sliceable: TypeAlias = bytes | memoryview | FileSlices
"""Content that a large upload takes its parts from."""

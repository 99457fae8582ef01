"""The header of a safetensors file: names, dtypes, shapes, and where each tensor lies. Pure.

The format is 8 bytes of little-endian header length, that many bytes of JSON, then the bytes of the
tensors without gaps. Parsed here without the ``safetensors`` package, which would bring a native
module for a hundred lines.

*Source*: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from adapter_bucket.errors import IntegrityError
from adapter_bucket.store import Payload

MAX_HEADER_BYTES = 16 * 1024**2
"""The header of an adapter is a few hundred KB for the largest models."""

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""What an adapter is served in, with the size of one number."""

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The same, as torch names them without prefix."""

_LENGTH_BYTES = 8
_MAX_TENSORS = 200_000
_MAX_DIM = 2**31


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file. ``start`` and ``end`` are byte offsets from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(data: Payload) -> list[Tensor]:
    """Parse the header and check that the tensors fill the file exactly.

    Args:
        data: The whole file.

    Returns:
        The tensors in the order of their bytes.

    Raises:
        IntegrityError: the file is cut, too long, or its header is not one.
    """
    view = memoryview(data).cast("B")
    if len(view) < _LENGTH_BYTES:
        raise IntegrityError(f"safetensors file has {len(view)} bytes, too few for a header")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    body_at = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or body_at > len(view):
        raise IntegrityError(
            f"safetensors header announces {length} bytes in a file of {len(view)}"
        )
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES:body_at]))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"safetensors header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
        raise IntegrityError("safetensors header is not an object of tensors")
    tensors = [_tensor(name, entry, body_at) for name, entry in header.items() if name[:2] != "__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    at = body_at
    for tensor in tensors:
        if tensor.start != at:
            raise IntegrityError(f"tensor {tensor.name[:200]!r} leaves a gap or overlaps another")
        at = tensor.end
    if at != len(view):
        raise IntegrityError(
            f"safetensors file has {len(view)} bytes, its header describes {at}: it is cut, or "
            "something was appended"
        )
    return tensors


def _tensor(name: str, entry: Any, body_at: int) -> Tensor:
    fault = IntegrityError(f"safetensors header entry {name[:200]!r} is malformed")
    if not isinstance(entry, Mapping):
        raise fault
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _ints(shape) or not _ints(offsets) or len(offsets) != 2:
        raise fault
    if dtype not in DTYPE_BYTES:
        raise IntegrityError(
            f"tensor {name[:200]!r} has dtype {dtype[:20]!r}; adapters are {', '.join(DTYPE_BYTES)}"
        )
    begin, end = offsets
    if len(shape) > 8 or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise IntegrityError(
            f"tensor {name[:200]!r} has {end - begin} bytes, its shape {shape[:8]} needs another "
            "number"
        )
    return Tensor(name, dtype, tuple(shape), body_at + begin, body_at + end)


def _ints(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _MAX_DIM**2
        for item in value
    )

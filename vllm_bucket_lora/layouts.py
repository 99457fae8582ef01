"""Adapters whose files are laid out alike: all but the first are read in one piece.

Reading some 400 tensors one by one holds Python's lock for most of the time it takes, and the
engine loop, which needs the lock too, runs that much slower meanwhile. But the versions of a run
differ in their bytes only. So it is remembered where vLLM put each tensor of one file; the next
file is read at once, and its tensors are views into that.

Wrong weights are the worst fault, so nothing is concluded from names: each tensor of the file must
be found, bit by bit, at exactly one place of what vLLM made of the same file, and nothing else may
be there. Equal tensors (all of B before the first step) teach nothing, and the next file is tried.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapter_bucket.layout import CONFIG_FILE, WEIGHTS_FILE

logger = logging.getLogger(__name__)

PIECE = "bucket_lora_piece"
"""Attribute of an adapter that was read in one piece: its ``Piece``."""

_KEPT = 4
"""Layouts remembered; a server follows few runs at a time."""

_TRIES = 3
"""Adapters of one layout that may teach nothing. One is usual: the one before the first step."""

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

Place = tuple[str, str, int | None]
"""Module, ``lora_a`` or ``lora_b``, and which part of a packed module."""


@dataclass(frozen=True)
class Piece:
    """The bytes of an adapter, with what else is laid out like it."""

    layout: Layout
    data: Any
    """All tensors in the file's order, one tensor of one dimension."""


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a file are in vLLM's ``LoRAModel``."""

    header: bytes
    shapes: tuple[Any, ...]
    """A tensor without memory for each tensor of the file."""
    dtype: Any
    places: tuple[Place, ...]
    scaled: tuple[int, ...]
    """Tensors that vLLM multiplies by ``scaling``."""
    scaling: float
    skeleton: Any
    """The ``LoRAModel``, without tensors."""

    def read(self, number: int, path: Path, *, pin: bool) -> Any:
        """Make vLLM's adapter from a file of this layout; ``None`` if it is not whole."""
        import torch

        data = _read_data(path, self, pin=pin)
        if data is None:
            return None
        tensors = torch._utils._unflatten_dense_tensors(data, self.shapes)
        if self.scaled:
            torch._foreach_mul_([tensors[place] for place in self.scaled], self.scaling)
        lora = copy.copy(self.skeleton)
        lora.id = number
        lora.loras = {name: _copied(weights) for name, weights in self.skeleton.loras.items()}
        for tensor, place in zip(tensors, self.places, strict=True):
            _put(lora, place, tensor)
        setattr(lora, PIECE, Piece(self, data))
        return lora


class Layouts:
    """The layouts that a worker knows. One thread learns; another one may read meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Layout] = {}
        self._failed: Counter[tuple[bytes, bytes]] = Counter()

    def read(self, number: int, folder: Path, *, pin: bool) -> Any:
        """An adapter as vLLM would have it after merging, or ``None`` if its layout is new.

        Args:
            number: vLLM's number for it.
            folder: Directory with the adapter's two files, verified.
            pin: Whether to read into memory from which a GPU copies by itself.
        """
        try:
            layout = self._known.get(_key(folder))
            return layout and layout.read(number, folder / WEIGHTS_FILE, pin=pin)
        except OSError:  # vLLM's own reading comes next, and says what is wrong
            return None

    def learn(self, folder: Path, lora: Any) -> bool:
        """Remember how a file is laid out, from what vLLM made of it; whether it is known now.

        Args:
            folder: Directory with the adapter's two files.
            lora: vLLM's ``LoRAModel`` of the same files, merged.
        """
        key = _key(folder)
        if key not in self._known:
            if self._failed[key] == _TRIES:
                return False
            layout = _learn(key, folder / WEIGHTS_FILE, lora)
            if layout is None:
                self._failed[key] += 1
                return False
            logger.info("adapters of this layout are read in one piece from now on")
            self._known[key] = layout
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return True


def _key(folder: Path) -> tuple[bytes, bytes]:
    """Header and configuration: with both equal, vLLM does the same with two adapters."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        size = file.read(8)
        header = size + file.read(int.from_bytes(size, "little"))
    return header, (folder / CONFIG_FILE).read_bytes()


def _learn(key: tuple[bytes, bytes], path: Path, lora: Any) -> Layout | None:
    import torch

    header, config = key
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    in_order = sorted(entries.values(), key=lambda entry: entry["data_offsets"])
    ends = [0, *(entry["data_offsets"][1] for entry in in_order)]
    dtypes = {entry["dtype"] for entry in in_order}
    gaps = [entry["data_offsets"][0] for entry in in_order] != ends[:-1]
    if gaps or len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        return None
    layout = Layout(
        header=header,
        shapes=tuple(torch.empty(entry["shape"], device="meta") for entry in in_order),
        dtype=getattr(torch, _DTYPES[dtypes.pop()]),
        places=(), scaled=(), scaling=_scaling(json.loads(config)), skeleton=_skeleton(lora),
    )  # fmt: skip
    data = _read_data(path, layout, pin=False)
    if data is None:
        return None
    found = _contents(lora)
    places: list[Place] = []
    scaled: list[int] = []
    for number, tensor in enumerate(torch._utils._unflatten_dense_tensors(data, layout.shapes)):
        place = found.pop(_digest(tensor), None)
        if place is None:
            place = found.pop(_digest(tensor * layout.scaling), None)
            scaled.append(number)
        if place is None:
            return None
        places.append(place)
    if found:
        return None
    return replace(layout, places=tuple(places), scaled=tuple(scaled))


def _contents(lora: Any) -> dict[Any, Place | None]:
    """Every tensor of vLLM's adapter by its content; ``None`` where two are equal."""
    found: dict[Any, Place | None] = {}
    for name, weights in lora.loras.items():
        for attribute in ("lora_a", "lora_b"):
            value = getattr(weights, attribute)
            parts = enumerate(value) if isinstance(value, list) else [(None, value)]
            for part, tensor in parts:
                if tensor is not None:
                    key = _digest(tensor)
                    found[key] = None if key in found else (name, attribute, part)
    return found


def _digest(tensor: Any) -> Any:
    import torch

    data = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(data).digest()


def _scaling(config: dict[str, Any]) -> float:
    """PEFT's factor; if vLLM takes another one, no place is found for B."""
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    return float(config["lora_alpha"] / root)


def _skeleton(lora: Any) -> Any:
    bare = copy.copy(lora)
    bare.loras = {name: _copied(weights) for name, weights in lora.loras.items()}
    for weights, attribute in itertools.product(bare.loras.values(), ("lora_a", "lora_b")):
        value = getattr(weights, attribute)
        setattr(weights, attribute, [None] * len(value) if isinstance(value, list) else None)
    return bare


def _copied(weights: Any) -> Any:
    new = copy.copy(weights)
    for attribute in ("lora_a", "lora_b"):
        value = getattr(weights, attribute)
        if isinstance(value, list):
            setattr(new, attribute, list(value))
    return new


def _put(lora: Any, place: Place, tensor: Any) -> None:
    name, attribute, part = place
    if part is None:
        setattr(lora.loras[name], attribute, tensor)
    else:
        getattr(lora.loras[name], attribute)[part] = tensor


def _read_data(path: Path, layout: Layout, *, pin: bool) -> Any:
    """What follows the header, if it has the layout's size."""
    import torch

    elements = sum(shape.numel() for shape in layout.shapes)
    data = torch.empty(elements, dtype=layout.dtype, pin_memory=pin)
    bytes_ = memoryview(data.view(torch.uint8).numpy())
    at = 0
    with path.open("rb", buffering=0) as file:
        file.seek(len(layout.header))
        while at < len(bytes_) and (count := file.readinto(bytes_[at:])):
            at += count
        return data if at == len(bytes_) and not file.read(1) else None

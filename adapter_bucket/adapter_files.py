"""What makes the two files of a version an adapter that can be served. Pure.

A writer checks before anything is uploaded, so that a broken export (no tensors, wrapper names,
NaN, a B that was never trained) stops at the trainer that made it, with its cause, instead of
reaching replicas that answer as the base model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from adapter_bucket.errors import ConfigError, IntegrityError
from adapter_bucket.manifest import VersionEntry
from adapter_bucket.pieces import PIECE_BYTES
from adapter_bucket.safetensors_header import DTYPE_NAMES, Tensor, parse_header
from adapter_bucket.servable import servable_faults
from adapter_bucket.store import Payload

MAX_CONFIG_BYTES = 64 * 1024
"""The config travels inside the manifest, once per kept version. 900 full module paths fit."""

_KEY = re.compile(
    r"base_model\.model\.(?P<module>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\.lora_(?P<side>[AB])\.weight\Z"
)
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "default"}
)
"""Segments that torch.compile, FSDP, activation checkpointing and PEFT put into names."""

_SHOWN = 3


def canonical_config(adapter_config: Mapping[str, Any]) -> bytes:
    """Bytes of ``adapter_config.json``: a function of the content alone.

    The manifest carries the config inline; a reader writes the file with this function and checks
    it against the digest, so the file itself need not be fetched.

    Raises:
        ConfigError: the config holds what JSON cannot (sets, NaN), or is too large.
    """
    try:
        text = json.dumps(
            adapter_config, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the adapter config cannot be written as JSON: {error}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the adapter config has {len(text)} bytes, the limit is {MAX_CONFIG_BYTES}; name "
            "target modules by their last part (q_proj) instead of their full path"
        )
    return text.encode()


def adapter_faults(
    weights: Payload,
    adapter_config: Mapping[str, Any],
    *,
    dtype: str,
    rank: int,
    trained: bool,
    match_patterns: bool = False,
) -> list[str]:
    """Say what is wrong with an adapter, or nothing.

    Args:
        weights: The safetensors file.
        adapter_config: The content of ``adapter_config.json``.
        dtype: dtype the tensors must have, as torch names it without prefix.
        rank: Largest rank any module may have.
        trained: Whether the optimizer has stepped: then B may not be zero everywhere.
        match_patterns: Whether a module must have the rank that ``rank_pattern`` gives it. Its keys
            are regular expressions, and one of a stranger can run for hours: only for a config of
            one's own. Otherwise any of the config's ranks will do, as it does for vLLM.

    Returns:
        One text per fault; tensors are named, at most three of them.
    """
    try:
        tensors = parse_header(weights)
    except IntegrityError as error:
        return [str(error)]
    if not tensors:
        return [
            "the safetensors file holds no tensors: nothing is trainable, or a sharded model was "
            "saved without gathering its parameters"
        ]
    faults = [*_name_faults(tensors), *_dtype_faults(tensors, dtype)]
    if not faults:
        faults += _rank_faults(tensors, adapter_config, rank, match_patterns)
        faults += _target_faults(tensors, adapter_config)
        faults += _value_faults(tensors, memoryview(weights).cast("B"), trained=trained)
    return faults


def check_adapter(entry: VersionEntry, weights: Payload) -> None:
    """Refuse a version that cannot be served as it is.

    Raises:
        ConfigError: its config names a feature that vLLM does not serve.
        IntegrityError: its tensors are not what config and entry promise.
    """
    if faults := servable_faults(entry.adapter_config):
        raise ConfigError(f"version {entry.version} cannot be served: {'; '.join(faults)}")
    faults = adapter_faults(
        weights,
        entry.adapter_config,
        dtype=entry.dtype,
        rank=entry.rank,
        trained=entry.step > 0,
        match_patterns=True,
    )
    if faults:
        raise IntegrityError(f"version {entry.version} is not published: {'; '.join(faults)}")


def _name_faults(tensors: list[Tensor]) -> list[str]:
    faults = []
    wrapped = [t.name for t in tensors if _WRAPPERS.intersection(t.name.split("."))]
    other = [t.name for t in tensors if not _KEY.match(t.name) and t.name not in wrapped]
    if wrapped:
        faults.append(
            f"{_some(wrapped)}: strip the wrapper segments ({', '.join(sorted(_WRAPPERS))}) "
            "before saving"
        )
    if other:
        faults.append(
            f"{_some(other)}: a tensor of a plain LoRA adapter is named "
            "base_model.model.<module>.lora_A.weight or ….lora_B.weight"
        )
    return faults


def _dtype_faults(tensors: list[Tensor], dtype: str) -> list[str]:
    other = [t.name for t in tensors if DTYPE_NAMES[t.dtype] != dtype]
    return [f"{_some(other)}: not {dtype}, the dtype announced for all tensors"] if other else []


def _rank_faults(
    tensors: list[Tensor], config: Mapping[str, Any], rank: int, match_patterns: bool
) -> list[str]:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for module, side, tensor in _parts(tensors):
        shapes.setdefault(module, {})[side] = tensor.shape
    unpaired = [module for module, sides in shapes.items() if len(sides) != 2]
    wrong, above = [], []
    patterns = config.get("rank_pattern")
    of_config = [config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    for module, sides in shapes.items():
        if module in unpaired:
            continue
        a, b = sides["A"], sides["B"]
        expected = [_expected_rank(module, config)] if match_patterns else of_config
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] not in expected:
            ranks = " or ".join(map(str, expected[:_SHOWN]))
            wrong.append(f"{module} A{list(a)} B{list(b)} for rank {ranks}")
        elif a[0] > rank:
            above.append(f"{module} has rank {a[0]}")
    faults = []
    if unpaired:
        faults.append(f"{_some(unpaired)}: has only one of lora_A and lora_B")
    if wrong:
        faults.append(f"{_some(wrong)}: A is [rank, in] and B is [out, rank]")
    if above:
        faults.append(f"{_some(above)}: above the announced largest rank {rank}")
    return faults


def _expected_rank(module: str, config: Mapping[str, Any]) -> Any:
    patterns = config.get("rank_pattern")
    for pattern, value in (patterns if isinstance(patterns, Mapping) else {}).items():
        # PEFT's own rule: the pattern matches the whole module name or its end.
        if _matches(rf"(.*\.)?({pattern})\Z", module):
            return value
    return config.get("r")


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.match(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):  # the last two: huge counts, deep nesting
        return False


def _target_faults(tensors: list[Tensor], config: Mapping[str, Any]) -> list[str]:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        return ["target_modules of the adapter config is not a list of names"]
    modules = sorted({module for module, _, _ in _parts(tensors)})
    ends = set(targets)
    strange = [m for m in modules if not _is_target(m, ends)]
    seen = {target for target in ends if any(_is_target(m, {target}) for m in modules)}
    faults = []
    if strange:
        faults.append(f"{_some(strange)}: not among target_modules")
    if missing := sorted(ends - seen):
        faults.append(
            f"target_modules names {_some(missing)}, for which the file holds no tensors: they "
            "were lost while saving, or this model has no such module; then remove the name"
        )
    return faults


def _is_target(module: str, targets: set[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[start:]) in targets for start in range(len(parts)))


def _value_faults(tensors: list[Tensor], view: memoryview, *, trained: bool) -> list[str]:
    """Of tensors of one dtype that follow each other without a gap."""
    faults, broken = [], []
    # In a few large pieces first: 392 tensors would be as many waits for a busy interpreter.
    pieces = _pieces(view[tensors[0].start : tensors[-1].end])
    if not all(_all_finite(piece, tensors[0].dtype) for piece in pieces):
        broken = [t.name for t in tensors if not _all_finite(view[t.start : t.end], t.dtype)]
    if broken:
        faults.append(f"{_some(broken)}: holds NaN or infinity; the training diverged")
    b_sides = [tensor for _, side, tensor in _parts(tensors) if side == "B"]
    if trained and all(_all_zero(view[t.start : t.end]) for t in b_sides):
        faults.append(
            "every lora_B is zero although the optimizer has stepped: the adapter has no effect. "
            "The saved parameters are not the trained ones, or no step had a gradient yet"
        )
    return faults


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _all_finite(data: memoryview, dtype: str) -> bool:
    """Whether no number is NaN or infinite: whether some exponent has all its bits set.

    With numpy, which torch and vLLM bring along, 148 MB of bfloat16 take 0.06 s, mostly without
    the interpreter lock. Byte by byte they take 1.2 s with the lock held, for which a training loop
    or a server in the same process would stand still.
    """
    numpy = _numpy()
    if numpy is None:
        return _all_finite_by_bytes(data, dtype)
    mask = numpy.array(_EXPONENT_BITS[dtype], dtype="<u4" if dtype == "F32" else "<u2")
    words = numpy.frombuffer(data, dtype=mask.dtype)
    return not ((words & mask) == mask).any()


_EXPONENT_BITS = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


@functools.cache
def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _all_finite_by_bytes(data: memoryview, dtype: str) -> bool:
    """``_all_finite`` without numpy, by the byte that holds the exponent."""
    step = 4 if dtype == "F32" else 2
    high = bytes(data[step - 1 :: step])
    if dtype == "F16":  # five exponent bits, all in this byte
        return not high.translate(None, _NOT_F16_SPECIAL)
    if not high.translate(None, _NOT_WIDE_SPECIAL):
        return True
    # Seven of eight exponent bits are set somewhere (|x| ≥ 1.7e38): look at the last one too.
    low = bytes(data[step - 2 :: step])
    return not any(h & 0x7F == 0x7F and lo & 0x80 for h, lo in zip(high, low, strict=True))


_NOT_F16_SPECIAL = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)
_NOT_WIDE_SPECIAL = bytes(byte for byte in range(256) if byte & 0x7F != 0x7F)


def _all_zero(data: memoryview) -> bool:
    return not bytes(data).translate(None, b"\x00\x80")  # 0x80 as the sign of -0.0


def _parts(tensors: list[Tensor]) -> Iterable[tuple[str, str, Tensor]]:
    for tensor in tensors:
        match = _KEY.match(tensor.name)
        if match is not None:
            yield match["module"], match["side"], tensor


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

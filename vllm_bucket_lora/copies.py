"""The copies that vLLM makes from an adapter into a slot, recorded once and made again at once.

``set_lora`` copies tensor by tensor, some 400 times. For an adapter that was read in one piece
(``layouts``), each of these copies takes certain bytes of the piece to a certain place, the same
for every adapter of that layout. So they are recorded, and later the piece goes to the device in
one transfer and from there to its places in one multi-tensor copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Copies:
    """The recorded copies of one layout."""

    def __init__(self, data: Any, pairs: list[tuple[Any, Any]], device: Any) -> None:
        """Take device memory for a piece.

        Args:
            data: The piece from which the copies were recorded.
            pairs: Target and source of each.
            device: Where the targets are.
        """
        import torch

        self._torch = torch
        self._landing = torch.empty_like(data, device=device, pin_memory=False)
        self._targets = [target for target, _ in pairs]
        self._sources = [
            self._landing.as_strided(source.size(), source.stride(), source.storage_offset())
            for _, source in pairs
        ]

    def make(self, data: Any) -> None:
        """Copy another piece to the same places, on the current stream."""
        self._landing.copy_(data, non_blocking=True)
        self._torch._foreach_copy_(self._targets, self._sources)


def record(work: Callable[[], None], data: Any, device: Any) -> Copies | None:
    """Run ``work`` and record its copies; ``None`` if it does anything but copy from ``data``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    pairs: list[tuple[Any, Any]] = []
    only_copies = True

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal only_copies
            if func._schema.name == "aten::copy_":
                pairs.append((args[0], args[1]))
            elif not _makes_a_view(func):
                only_copies = False
            return func(*args, **(kwargs or {}))

    with Recorder():
        work()
    origin = data.untyped_storage().data_ptr()
    if not only_copies or any(
        source.untyped_storage().data_ptr() != origin
        or not source.dtype == target.dtype == data.dtype
        or source.size() != target.size()
        for target, source in pairs
    ):
        return None
    return Copies(data, pairs, device)


def _makes_a_view(func: Any) -> bool:
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in func._schema.arguments
    )

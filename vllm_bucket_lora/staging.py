"""Slot images: an adapter on the device, laid out as a slot, made beside the engine loop.

vLLM fills a slot module by module inside the loop: hundreds of small fills and copies from the
host, for which every request waits. Here a thread lets vLLM's own ``set_lora`` write into a staging
area on a stream of its own, with the same slicing and padding, and the loop copies that area into
the slot at once, from device to device.

Wrong weights are the worst fault, so the first adapter of a process goes both ways and the results
are compared; if they differ, staging stays off.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from vllm_bucket_lora import copies
from vllm_bucket_lora.layouts import PIECE, Layout, Piece

logger = logging.getLogger(__name__)

_STAGE = "_bucket_lora_stage"
"""Attribute of the LoRA manager: its ``Stage``, or ``None`` once staging is off."""


@dataclass
class Part:
    """One module of the model and its copy that writes into the staging area."""

    module: Any
    shadow: Any

    def slots(self) -> tuple[Any, ...]:
        """Where the model reads: ``[slots, 1, rows, columns]`` each."""
        return (*self.module.lora_a_stacked, *self.module.lora_b_stacked)

    def images(self) -> tuple[Any, ...]:
        """One slot of each, in the staging area."""
        return (*self.shadow.lora_a_stacked, *self.shadow.lora_b_stacked)


class Stage:
    """The staging area of one worker, room for one adapter.

    ``fill`` runs in the preparing thread, all else in the engine loop. ``holds`` says whose turn it
    is: the thread sets it last, the loop clears it last.
    """

    def __init__(self, manager: Any) -> None:
        """Take one slot's worth of device memory.

        Args:
            manager: vLLM's ``LoRAModelManager``.
        """
        import torch
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        self._torch = torch
        self._stream = torch.cuda.Stream(manager.device) if manager.device.type == "cuda" else None
        self._read: Any = None
        """When the loop's last copy from here is done."""
        self._areas: list[Any] = []
        self._proven = False
        self._copies: tuple[Layout, copies.Copies] | None = None
        self._missed: Layout | None = None
        """Layout of the last piece that came without recorded copies."""
        self.holds: Any = None
        """The ``LoRAModel`` that is staged: itself, as its number may come again."""
        with self._on_stream():  # memory of the loop's own stream may still be in use there
            self._parts = {
                name: self._part(module)
                for name, module in manager.modules.items()
                if isinstance(module, BaseLinearLayerWithLoRA)
            }
            # Ahead of the first copy, or the loop would wait until its kernel is loaded.
            torch._foreach_copy_(self._areas, self._areas)
        self._images = [t[0] for part in self._parts.values() for t in part.images()]
        # Also ahead: 392 views take 5 ms.
        self._slots = [
            [t[slot] for part in self._parts.values() for t in part.slots()]
            for slot in range(manager.lora_slots)
        ]

    def fill(self, manager: Any, lora: Any) -> bool:
        """Stage an adapter whose modules are merged; ``False`` if another one is still there."""
        if self.holds is not None:
            return False
        with self._on_stream():
            if self._stream is not None and self._read is not None:
                self._stream.wait_event(self._read)
            self._torch._foreach_zero_(self._areas)
            piece = getattr(lora, PIECE, None)
            if piece is None or not self._copy(piece):
                self._set(manager, lora)
            if piece is not None and self._is_worth_recording(piece.layout):
                try:
                    self._record(manager, lora, piece)
                except self._torch.OutOfMemoryError:
                    logger.warning("adapters are staged in parts: no device memory for one more")
                    self._torch._foreach_zero_(self._areas)
                    self._set(manager, lora)
        if self._stream is not None:
            self._stream.synchronize()
        self.holds = lora
        return True

    def activate(self, manager: Any, number: int, original: Any) -> Any:
        """Run vLLM's ``activate_adapter`` with its copies replaced by one.

        Args:
            manager: vLLM's ``LoRAModelManager``.
            number: The adapter, which must be the one that is staged.
            original: vLLM's method.

        Raises:
            StagingDiffers: vLLM put something else into the slot; the adapter is not active.
        """
        every = manager.modules
        if self._proven:
            manager.modules = {n: m for n, m in every.items() if n not in self._parts}
        try:
            activated = original(manager, number)
        finally:
            manager.modules = every
        try:
            self._complete(manager.lora_index_to_id.index(number))
        except BaseException:
            manager.deactivate_adapter(number)  # else the next request would take it as it is
            raise
        return activated

    def _set(self, manager: Any, lora: Any) -> None:
        for name, part in self._parts.items():
            weights = manager._get_lora_layer_weights(lora, name)
            if weights:
                part.shadow.set_lora(0, weights.lora_a, weights.lora_b)

    def _copy(self, piece: Piece) -> bool:
        """Stage a piece of a layout whose copies are recorded."""
        if self._copies is None or self._copies[0] is not piece.layout:
            return False
        self._copies[1].make(piece.data)
        return True

    def _is_worth_recording(self, layout: Layout) -> bool:
        """Not for a layout that takes turns with the recorded one: there is room for one."""
        if self._copies is not None and self._copies[0] is layout:
            self._missed = None
            return False
        again, self._missed = self._missed is layout, layout
        return self._copies is None or again

    def _record(self, manager: Any, lora: Any, piece: Piece) -> None:
        """Record the copies of a staged adapter, and prove them on it."""
        self._copies = None
        wanted = [image.clone() for image in self._images]
        found = copies.record(lambda: self._set(manager, lora), piece.data, manager.device)
        if found is not None:
            self._torch._foreach_zero_(self._areas)
            found.make(piece.data)
            if all(map(self._torch.equal, wanted, self._images)):
                self._copies = (piece.layout, found)
                logger.info("adapters of this layout are staged in one piece from now on")
                return
            logger.error("copies in one piece differ from vLLM's: adapters are staged in parts")
            self._torch._foreach_zero_(self._areas)
            self._set(manager, lora)

    def _complete(self, slot: int) -> None:
        """Copy into the slot; or, for the first adapters, compare with what vLLM put there."""
        if self._proven:
            self._torch._foreach_copy_(self._slots[slot], self._images)
            if self._stream is not None:
                self._read = self._torch.cuda.Event()
                self._read.record()
        elif not all(map(self._torch.equal, self._slots[slot], self._images)):
            raise StagingDiffers
        else:  # zeros would prove little: an adapter before its first step has them in all of B
            self._proven = any(bool(image.any()) for image in self._b_images())
            if self._proven:
                logger.info("staged adapters are what vLLM loads: slots are filled from them")

    def _on_stream(self) -> Any:
        return (
            contextlib.nullcontext()
            if self._stream is None
            else self._torch.cuda.stream(self._stream)
        )

    def _part(self, module: Any) -> Part:
        """A module with a copy that shares everything but its slots, of which it has one."""
        shadow = copy.copy(module)
        for attribute in ("lora_a_stacked", "lora_b_stacked"):
            images = tuple(self._torch.empty_like(t[:1]) for t in getattr(module, attribute))
            setattr(shadow, attribute, images)
            self._areas += images
        shadow.reset_lora = _nothing  # all images are cleared at once
        return Part(module, shadow)

    def _b_images(self) -> list[Any]:
        return [t for part in self._parts.values() for t in part.shadow.lora_b_stacked]


class StagingDiffers(Exception):
    """The staging area does not hold what vLLM itself puts into a slot."""


def _nothing(_slot: int) -> None:
    pass


def stage(manager: Any, lora: Any) -> None:
    """Lay an adapter whose modules are merged out on the device.

    A help, not a condition: without it vLLM fills the slot itself.

    Args:
        manager: vLLM's ``LoRAModelManager``.
        lora: vLLM's ``LoRAModel``.
    """
    if getattr(manager, _STAGE, True) is None:
        return
    try:
        if not hasattr(manager, _STAGE):
            setattr(manager, _STAGE, Stage(manager))
        getattr(manager, _STAGE).fill(manager, lora)
    except Exception:  # no memory left, or a layer of an unknown kind
        setattr(manager, _STAGE, None)
        logger.exception("adapters are not staged: the engine loop copies them from now on")


def drop_unless(manager: Any, expected: Container[int]) -> None:
    """Make room if the load of the staged adapter never came. For the engine loop."""
    staged = getattr(manager, _STAGE, None)
    if staged is not None and staged.holds is not None and staged.holds.id not in expected:
        staged.holds = None


def install() -> None:
    """Wrap ``LoRAModelManager.activate_adapter``. Idempotent.

    To be removed once vLLM fills slots outside its loop; 0.31 does not.
    """
    from vllm.lora.model_manager import LoRAModelManager

    original = LoRAModelManager.activate_adapter
    if getattr(original, "_bucket_lora", False):
        return

    @functools.wraps(original)
    def activate_adapter(self: Any, lora_id: int) -> Any:
        staged = getattr(self, _STAGE, None)
        if staged is None or staged.holds is None or lora_id in self._active_adapters:
            return original(self, lora_id)
        if staged.holds is not self.get_adapter(lora_id):  # never by its number: it comes again
            if staged.holds.id == lora_id:
                staged.holds = None
            return original(self, lora_id)
        try:
            return staged.activate(self, lora_id, original)
        except StagingDiffers:
            setattr(self, _STAGE, None)
            logger.error("a staged adapter differs from what vLLM loads: staging is off")
            return original(self, lora_id)
        finally:
            staged.holds = None

    activate_adapter._bucket_lora = True  # type: ignore[attr-defined]
    LoRAModelManager.activate_adapter = activate_adapter

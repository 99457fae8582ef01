"""Which replica holds which prefix: a model of the replicas' caches, fed by what was sent to them.

Memory is bounded: per replica there are at most as many blocks as it can cache, and the least
recently used go first. Within a chain the last block goes first, as in vLLM, so a replica that
holds a block holds all blocks before it.

Chains are kept as a tree whose nodes are runs of blocks that no chain leaves in between. So a
prompt is found, noted and forgotten in a few steps, however long it is: a table of its blocks took
half as long as everything else that a decision takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from bucket_lora_proxy.prefix import BLOCK_TOKENS, Prompt

DEFAULT_BLOCKS = 16_384
"""Capacity taken for a replica that does not tell its own: 262,144 tokens."""

MAX_BLOCKS = 65_536
"""Largest capacity that is modelled. More cache only means more hits than predicted."""


class _Node:
    """A run of consecutive blocks. The root of a tree is one without any."""

    __slots__ = ("blocks", "children", "held", "parent")

    def __init__(self, blocks: tuple[int, ...], parent: _Node | None) -> None:
        self.blocks = blocks
        self.parent = parent
        self.children: dict[int, _Node] = {}
        """What goes on after the last block, by its first block."""
        self.held: dict[int, int] = {}
        """How many of the blocks each replica (by slot) holds; all of them if it holds any of a
        child's."""

    def shared(self, chain: Sequence[int], start: int) -> int:
        """How many of the blocks are those of the chain from ``start`` on, of which the first is.

        A block's hash covers all before it, so the last one tells of all.
        """
        end = min(len(self.blocks), len(chain) - start)
        if self.blocks[end - 1] == chain[start + end - 1]:
            return end
        return bisect_left(range(end), True, key=lambda at: self.blocks[at] != chain[start + at])

    def split(self, length: int) -> _Node:
        """Put a node for the first so many blocks before this one, which keeps the rest."""
        assert self.parent is not None
        upper = _Node(self.blocks[:length], self.parent)
        self.parent.children[upper.blocks[0]] = upper
        self.blocks, self.parent = self.blocks[length:], upper
        upper.children[self.blocks[0]] = self
        upper.held = {slot: min(held, length) for slot, held in self.held.items()}
        self.held = {slot: held - length for slot, held in self.held.items() if held > length}
        return upper

    def lose(self, slot: int, count: int) -> None:
        """The replica holds so many blocks less; blocks that none holds any more go."""
        held = self.held.pop(slot) - count
        if held:
            self.held[slot] = held
        if self.held:
            self.blocks = self.blocks[: max(self.held.values())]
        elif self.parent is not None:
            del self.parent.children[self.blocks[0]]


class _Cache:
    """What one replica holds under one name."""

    __slots__ = ("count", "order")

    def __init__(self) -> None:
        self.count = 0
        """In blocks."""
        self.order: OrderedDict[_Node, None] = OrderedDict()
        """Least recently used first, and every node before its parent."""

    def use(self, node: _Node | None) -> None:
        """A chain that ends there was used."""
        while node is not None and node.blocks:
            self.order[node] = None
            self.order.move_to_end(node)
            node = node.parent


class PrefixIndex:
    """Replicas are numbered by *slot*.

    Blocks are kept apart by model name: a retired version goes in one step, and eviction takes the
    name that was used least recently first.
    """

    def __init__(self, slots: int) -> None:
        self._roots: dict[str, _Node] = {}
        self._caches: list[OrderedDict[str, _Cache]] = [OrderedDict() for _ in range(slots)]
        self._count = [0] * slots
        self._capacity = [DEFAULT_BLOCKS] * slots
        self._grain = [1] * slots
        """Blocks of ours that one block of the replica's cache holds."""
        self._coarse = False

    def add_slot(self) -> int:
        """Make room for one more replica; returns its slot."""
        self._caches.append(OrderedDict())
        self._count.append(0)
        self._capacity.append(DEFAULT_BLOCKS)
        self._grain.append(1)
        return len(self._count) - 1

    def blocks(self, slot: int) -> int:
        """How many blocks a replica is taken to hold."""
        return self._count[slot]

    def names(self) -> set[str]:
        """Model names of which any replica holds a block."""
        return set(self._roots)

    def set_capacity(self, slot: int, blocks: int | None) -> None:
        """Set how many blocks a replica can cache; ``None`` if it is not known."""
        self._capacity[slot] = min(blocks or DEFAULT_BLOCKS, MAX_BLOCKS)
        self._evict(slot)

    def set_block_tokens(self, slot: int, tokens: int | None) -> None:
        """Set how many tokens a block of the replica's cache has; ``None`` if it is not known.

        A replica shares whole blocks of its own only, so a shorter match there is worth nothing.
        """
        self._grain[slot] = max(1, (tokens or BLOCK_TOKENS) // BLOCK_TOKENS)
        self._coarse = max(self._grain) > 1

    def matched(self, prompt: Prompt, slots: list[int]) -> list[int]:
        """How many blocks of the prompt each of the replicas holds, in the order of ``slots``."""
        found = [0] * len(slots)
        root = self._roots.get(prompt.name)
        if root is not None:
            for chain in prompt.chains:
                if ends := _ends(root, chain):
                    pairs = zip(found, slots, strict=True)
                    found = [count + ends.get(slot, 0) for count, slot in pairs]
        if self._coarse:
            grains = (self._grain[slot] for slot in slots)
            return [count - count % grain for count, grain in zip(found, grains, strict=True)]
        return found

    def add(self, slot: int, prompt: Prompt) -> None:
        """The replica has been sent this prompt, so it will hold its blocks."""
        if not any(prompt.chains):
            return
        caches = self._caches[slot]
        if prompt.name not in caches:
            caches[prompt.name] = _Cache()
        caches.move_to_end(prompt.name)
        if prompt.name not in self._roots:
            self._roots[prompt.name] = _Node((), None)
        for chain in prompt.chains:
            self._hold(slot, prompt.name, chain)
        if self._count[slot] > self._capacity[slot]:
            self._evict(slot)

    def _hold(self, slot: int, name: str, chain: tuple[int, ...]) -> None:
        """Take in one chain, and mark all of it as used just now."""
        cache = self._caches[slot][name]
        node, length, added = self._roots[name], 0, 0
        while length < len(chain):
            child = node.children.get(chain[length])
            if child is None:
                child = node.children[chain[length]] = _Node(chain[length:], node)
            shared = child.shared(chain, length)
            length += shared
            if shared < len(child.blocks) and length < len(chain):
                child = self._split(name, child, shared)
            held = child.held.get(slot, 0)
            if held < shared:
                child.held[slot] = shared
                added += shared - held
            node = child
        cache.use(node)
        cache.count += added
        self._count[slot] += added

    def _split(self, name: str, node: _Node, length: int) -> _Node:
        """Split a node; the first part counts as just used, as it has to go after the second."""
        upper = node.split(length)
        for slot in upper.held:
            cache = self._caches[slot][name]
            if slot not in node.held:
                del cache.order[node]
            cache.use(upper)
        return upper

    def _evict(self, slot: int) -> None:
        caches = self._caches[slot]
        while (surplus := self._count[slot] - self._capacity[slot]) > 0:
            name, cache = next(iter(caches.items()))
            if cache.order:
                node = next(iter(cache.order))
                going = min(surplus, node.held[slot])
                node.lose(slot, going)
                if slot not in node.held:
                    del cache.order[node]
                cache.count -= going
                self._count[slot] -= going
            if not cache.order:
                del caches[name]
                if not self._roots[name].children:
                    del self._roots[name]

    def drop_slot(self, slot: int) -> None:
        """The replica has restarted, or left: it holds nothing."""
        capacity, self._capacity[slot] = self._capacity[slot], 0
        self._evict(slot)
        self._capacity[slot] = capacity

    def drop_name(self, name: str) -> None:
        """The version is retired: nobody will ask for its blocks again."""
        self._roots.pop(name, None)
        for slot, caches in enumerate(self._caches):
            cache = caches.pop(name, None)
            if cache is not None:
                self._count[slot] -= cache.count
                for node in cache.order:
                    node.parent = None  # a cycle would keep all of them until cycles are collected


def _ends(root: _Node, chain: Sequence[int]) -> dict[int, int]:
    """How many blocks of a chain each replica holds, by slot."""
    ends: dict[int, int] = {}
    node, length = root, 0
    while length < len(chain):
        child = node.children.get(chain[length])
        if child is None:
            break
        shared = child.shared(chain, length)
        for slot, held in child.held.items():
            ends[slot] = length + (held if held < shared else shared)
        if shared < len(child.blocks):
            break
        node, length = child, length + shared
    return ends

"""Which replica holds which prefix: a model of the replicas' caches, fed by what was sent to them.

Memory is bounded: per replica there are at most as many blocks as it can cache, and the least
recently used go first. Within a chain the last block goes first, as in vLLM, so a replica that
holds a block holds all blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict

from bucket_lora_proxy.prefix import BLOCK_TOKENS, Prompt

DEFAULT_BLOCKS = 16_384
"""Capacity taken for a replica that does not tell its own: 262,144 tokens."""

MAX_BLOCKS = 65_536
"""Largest capacity that is modelled, about 15 MB a replica. More cache only means more hits than
predicted."""

FRESH_CHAINS = 64
"""Chains that are not moved to the front again at once: a group's requests come together, and to
move all blocks for each was half of what a decision took. The order is off by so many prompts."""


class PrefixIndex:
    """Replicas are numbered by *slot*; sets of them are bit masks.

    Blocks are kept apart by model name: a retired version goes in one step, and eviction takes the
    name that was used least recently first.
    """

    def __init__(self, slots: int) -> None:
        self._holders: dict[str, dict[int, int]] = {}
        self._recency: list[OrderedDict[str, OrderedDict[int, None]]] = [
            OrderedDict() for _ in range(slots)
        ]
        self._count = [0] * slots
        self._capacity = [DEFAULT_BLOCKS] * slots
        self._fresh: list[set[int]] = [set() for _ in range(slots)]
        self._grain = [1] * slots
        """Blocks of ours that one block of the replica's cache holds."""
        self._coarse = False

    def add_slot(self) -> int:
        """Make room for one more replica; returns its slot."""
        self._recency.append(OrderedDict())
        self._count.append(0)
        self._capacity.append(DEFAULT_BLOCKS)
        self._fresh.append(set())
        self._grain.append(1)
        return len(self._count) - 1

    def blocks(self, slot: int) -> int:
        """How many blocks a replica is taken to hold."""
        return self._count[slot]

    def names(self) -> set[str]:
        """Model names of which any replica holds a block."""
        return set(self._holders)

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
        holders = self._holders.get(prompt.name)
        if holders:
            for chain in prompt.chains:
                self._match(holders, chain, slots, found)
        if self._coarse:
            grains = (self._grain[slot] for slot in slots)
            return [count - count % grain for count, grain in zip(found, grains, strict=True)]
        return found

    @staticmethod
    def _match(
        holders: dict[int, int], chain: tuple[int, ...], slots: list[int], found: list[int]
    ) -> None:
        if not chain:
            return
        open_ = 0
        for slot in slots:
            open_ |= 1 << slot
        whole = holders.get(chain[-1], 0) & open_  # the last block is the first to go
        ends = [(len(chain), whole)] if whole else []
        open_ &= ~whole
        for length, block in enumerate(chain):
            still = holders.get(block, 0) & open_
            if still != open_:
                if length:
                    ends.append((length, open_ & ~still))
                open_ = still
            if not open_:
                break
        for length, ending in ends:
            for position, slot in enumerate(slots):
                if ending >> slot & 1:
                    found[position] += length

    def add(self, slot: int, prompt: Prompt) -> None:
        """The replica has been sent this prompt, so it will hold its blocks."""
        bit = 1 << slot
        holders = self._holders.setdefault(prompt.name, {})
        names = self._recency[slot]
        recency = names.get(prompt.name)
        if recency is None:
            recency = names[prompt.name] = OrderedDict()
        names.move_to_end(prompt.name)
        before = len(recency)
        for chain in prompt.chains:
            if chain and chain[-1] in recency and self._is_fresh(slot, chain[-1]):
                continue  # the whole chain is there, as its last block is the first to go
            self._hold(chain, bit, holders, recency)
        self._count[slot] += len(recency) - before
        if self._count[slot] > self._capacity[slot]:
            self._evict(slot)

    @staticmethod
    def _hold(
        chain: tuple[int, ...],
        bit: int,
        holders: dict[int, int],
        recency: OrderedDict[int, None],
    ) -> None:
        """Add a chain. Whoever holds a block holds all before it, so the first block that is not
        held says that none after it is, and most need no look-up.
        """
        known = 0
        while known < len(chain) and chain[known] in recency:
            known += 1
        new = chain[known:]
        for block in reversed(new):
            recency[block] = None
        for block in reversed(chain[:known]):
            recency.move_to_end(block)
        if new and new[0] not in holders:
            for block in new:
                holders[block] = bit
        else:
            for block in new:
                holders[block] = holders.get(block, 0) | bit

    def _is_fresh(self, slot: int, end: int) -> bool:
        """Whether a chain was moved to the front a moment ago; if not, it is about to be."""
        fresh = self._fresh[slot]
        if end in fresh:
            return True
        if len(fresh) >= FRESH_CHAINS:
            fresh.clear()
        fresh.add(end)
        return False

    def _evict(self, slot: int) -> None:
        bit = 1 << slot
        names = self._recency[slot]
        while self._count[slot] > self._capacity[slot]:
            name, recency = next(iter(names.items()))
            holders = self._holders[name]
            while recency and self._count[slot] > self._capacity[slot]:
                block, _ = recency.popitem(last=False)
                self._count[slot] -= 1
                _take(holders, block, bit)
            if not recency:
                del names[name]
                if not holders:
                    del self._holders[name]

    def drop_slot(self, slot: int) -> None:
        """The replica has restarted, or left: it holds nothing."""
        capacity, self._capacity[slot] = self._capacity[slot], 0
        self._evict(slot)
        self._capacity[slot] = capacity

    def drop_name(self, name: str) -> None:
        """The version is retired: nobody will ask for its blocks again."""
        self._holders.pop(name, None)
        for slot, names in enumerate(self._recency):
            self._count[slot] -= len(names.pop(name, ()))


def _take(holders: dict[int, int], block: int, bit: int) -> None:
    left = holders[block] & ~bit
    if left:
        holders[block] = left
    else:
        del holders[block]

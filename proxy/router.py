"""Applies the cost rule to the fleet: keeps the prefix index and the load of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from bucket_lora_proxy.prefix import BLOCK_TOKENS, Prompt
from bucket_lora_proxy.prefix_index import PrefixIndex
from bucket_lora_proxy.routing import choose

RECENT_PROMPTS = 64
"""How many new prompts back a placement still counts as load."""

RECENT_WEIGHT = 2
"""How much such a placement counts, in requests: the group will repeat the prompt. Balancing by
what is outstanding alone swings from replica to replica when a trainer sends a batch of prompts
again and again (work 1.16 : 1 among three replicas in the simulation; 1.02 : 1 with this)."""

RECENT_SHARE = 0.5
"""Most that all placements together count, relative to all outstanding work: they say nothing of
speed, so that more would give a slow replica more than its share."""


class Routed(Protocol):
    """A replica as the router sees it."""

    slot: int
    """Its number in the prefix index."""
    outstanding: float
    """Tokens that it still has to compute for the requests it was given."""


R = TypeVar("R", bound=Routed)


class Choice(NamedTuple, Generic[R]):
    """Where a request goes, and why."""

    replica: R
    matched_tokens: int
    """How much of the prompt the replica is taken to hold."""
    outcome: str
    """``hit``: it holds at least half of the prompt; ``spill``: another replica does, and was too
    loaded; ``new``: none does."""


class Router:
    """State between decisions. Not thread-safe: one event loop owns it."""

    def __init__(self, slots: int) -> None:
        self.index = PrefixIndex(slots)
        self._placed = [0.0] * slots
        """Work of the last new prompts that each replica was given, fading."""
        self._turn = 0
        self._free: list[int] = []
        """Slots of replicas that left."""

    def take_slot(self) -> int:
        """A slot for a replica that joins."""
        if self._free:
            return self._free.pop()
        self._placed.append(0.0)
        return self.index.add_slot()

    def free_slot(self, slot: int) -> None:
        """Forget a replica that left; its slot is used again, so nothing may be added to it."""
        self.index.drop_slot(slot)
        self.index.set_capacity(slot, None)
        self.index.set_block_tokens(slot, None)
        self._placed[slot] = 0.0
        self._free.append(slot)

    def pick(
        self, candidates: Sequence[R], prompt: Prompt, *, tried: Sequence[R] = ()
    ) -> Choice[R] | None:
        """Decide. Changes nothing but the tie-breaker; ``None`` without candidates."""
        self._turn += 1
        slots = [candidate.slot for candidate in candidates]
        blocks = self.index.matched(prompt, slots)
        matched = [count * BLOCK_TOKENS for count in blocks]  # whole blocks: not above its tokens
        position = choose(
            loads=self._loads(candidates, slots),
            matched_tokens=matched,
            prompt_tokens=prompt.tokens,
            decode_tokens=prompt.decode_tokens,
            passed_over=[candidate in tried for candidate in candidates] if tried else None,
            turn=self._turn,
        )
        if position is None:
            return None
        held = matched[position]
        half = prompt.tokens / 2
        outcome = "hit" if held >= half else "spill" if max(matched) >= half else "new"
        return Choice(candidates[position], held, outcome)

    def _loads(self, candidates: Sequence[R], slots: list[int]) -> list[float]:
        outstanding = [candidate.outstanding for candidate in candidates]
        placed = [self._placed[slot] for slot in slots]
        most, total = RECENT_SHARE * sum(outstanding) + 1, sum(placed)  # 1: still breaks ties
        factor = most / total if total > most else 1.0
        return [work + factor * recent for work, recent in zip(outstanding, placed, strict=True)]

    def begin(self, choice: Choice[R], prompt: Prompt) -> float:
        """The replica works on the request from now on; it holds the prompt from then on.

        Returns:
            What was added to ``outstanding``: take it off with ``end`` on every way out.
        """
        replica = choice.replica
        work = prompt.tokens - choice.matched_tokens + prompt.decode_tokens
        if choice.outcome == "new":
            fade = 1 - 1 / RECENT_PROMPTS
            self._placed = [placed * fade for placed in self._placed]
            self._placed[replica.slot] += RECENT_WEIGHT * work
        replica.outstanding += work
        self.index.add(replica.slot, prompt)
        return work

    @staticmethod
    def end(choice: Choice[R], work: float) -> None:
        """The replica has answered, or failed."""
        choice.replica.outstanding -= work

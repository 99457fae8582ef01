"""Which replica gets a request: the one with the least predicted cost. Pure.

The cost of a replica, in tokens, is what it would have to compute of the prompt, plus the prompt's
length times its surplus of load over the least loaded replica, relative to the load of that one. So
a replica that holds a share *s* of the prompt is preferred to the least loaded one until it has
1 + *s* / ``LOAD_WEIGHT`` times as much to do (and some slack): a short shared template never holds
requests together, a whole prompt does while its replica keeps up, and an overload spills, with no
rule made for any of these.
"""

from __future__ import annotations

from collections.abc import Sequence

LOAD_WEIGHT = 0.5
"""Price of a surplus as large as the least load, as a share of the prompt: a replica that holds the
whole prompt may have up to three times as much to do. At 1 the simulation spills 2 % where nothing
was overloaded; lower values let a hot prefix keep more than it should."""

SLACK_REQUESTS = 16
"""Added to the least load, in requests like this one: with few in flight, a group of rollouts or
two on one replica are no overload."""


def choose(
    *,
    loads: Sequence[float],
    matched_tokens: Sequence[int],
    prompt_tokens: int,
    decode_tokens: int,
    passed_over: Sequence[bool] | None = None,
    turn: int = 0,
) -> int | None:
    """Pick the candidate with the least cost.

    Args:
        loads: work ahead of each candidate, in tokens.
        matched_tokens: of each, how much of the prompt it holds.
        prompt_tokens: length of the prompt.
        decode_tokens: tokens that the request may produce.
        passed_over: of each, whether it already failed this request; such a candidate is picked
            only if there is no other.
        turn: a running number that breaks ties, so that an idle fleet is filled evenly.

    Returns:
        Its position, or ``None`` if there is no candidate.
    """
    count = len(loads)
    if count < 2:
        return 0 if count else None
    least = min(loads)
    scale = least + SLACK_REQUESTS * (prompt_tokens + decode_tokens) + 1
    price = LOAD_WEIGHT * max(prompt_tokens, 1) / scale
    if passed_over is not None and all(passed_over):
        passed_over = None
    best, best_cost = -1, 0.0
    for step in range(count):
        index = (turn + step) % count
        if passed_over is not None and passed_over[index]:
            continue
        cost = prompt_tokens - matched_tokens[index] + price * (loads[index] - least)
        if best < 0 or cost < best_cost:
            best, best_cost = index, cost
    return best

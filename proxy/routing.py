"""Which replica gets a request: the one with the least predicted cost. Pure.

The cost of a replica, in tokens, is what it would have to compute of the prompt, plus the prompt's
length times its surplus of load over the least loaded replica, relative to the load of that one. So
a replica that holds a share *s* of the prompt is preferred to the least loaded one until it has
1 + *s* / ``LOAD_WEIGHT`` times as much to do (and some slack): a short shared template never holds
requests together, a whole prompt does while its replica keeps up, and an overload spills, with no
rule made for any of these.
"""

from __future__ import annotations

import math
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
    if len(loads) < 2:
        return 0 if loads else None
    scale = min(loads) + SLACK_REQUESTS * (prompt_tokens + decode_tokens) + 1
    price = LOAD_WEIGHT * max(prompt_tokens, 1) / scale
    # Less what is the same for all: the prompt's length, and the price of the least load.
    costs = [price * load - held for load, held in zip(loads, matched_tokens, strict=True)]
    if passed_over is not None and not all(passed_over):
        costs = [math.inf if over else cost for cost, over in zip(costs, passed_over, strict=True)]
    least = min(costs)
    first = turn % len(costs)
    return costs.index(least, first) if least in costs[first:] else costs.index(least)

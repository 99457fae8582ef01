"""The short form of the fault run; ``make faults`` makes 20,000 requests."""

from __future__ import annotations

import asyncio

from tests.faults.proxy_run import run

REQUESTS = 2500


def test_nothing_is_lost_mixed_up_or_delivered_twice_whatever_happens_to_replicas() -> None:
    outcome = asyncio.run(run(REQUESTS, seed=7))
    assert outcome.problems(REQUESTS) == []
    assert outcome.met_every_fault

from __future__ import annotations

from dataclasses import dataclass

from bucket_lora_proxy.slow_start import hold_back


@dataclass
class Some:
    in_flight: int
    warm_at: float = -100.0

    def warmth(self, now: float) -> float:
        return 1 - (self.warm_at - now) / 10


def test_a_new_replica_is_given_a_growing_share_of_what_the_others_have() -> None:
    warm = [Some(40), Some(20)]
    for age_s, allowed in ((0.0, 1), (1.0, 3), (5.0, 15), (9.99, 30)):
        below, at = Some(allowed - 1, warm_at=10 - age_s), Some(allowed, warm_at=10 - age_s)
        assert hold_back([*warm, below], 0.0) == [*warm, below]
        assert hold_back([*warm, at], 0.0) == warm
    assert len(hold_back([*warm, Some(500, warm_at=0)], 0.0)) == 3


def test_a_fleet_that_starts_as_a_whole_is_not_held_back() -> None:
    new = [Some(100, warm_at=10), Some(5, warm_at=9)]
    assert hold_back(new, 0.0) == new


def test_it_never_leaves_nobody() -> None:
    assert hold_back([Some(9, warm_at=10)], 0.0) == [Some(9, warm_at=10)]
    assert hold_back([], 0.0) == []

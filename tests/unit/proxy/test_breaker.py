from __future__ import annotations

from bucket_lora_proxy.breaker import FAILURES, MAX_OPEN_S, OPEN_S, Breaker


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.begin()
        breaker.fail(100.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.fail(100.0)
    assert breaker.allows(100.0)
    breaker.succeed()
    for _ in range(FAILURES - 1):
        breaker.fail(100.0)
    assert breaker.closed
    breaker.fail(100.0)
    assert not breaker.closed
    assert not breaker.allows(100.0)


def test_after_the_pause_one_request_is_tried_and_success_closes_it() -> None:
    breaker = opened()
    assert not breaker.allows(100.0 + OPEN_S - 0.01)
    assert breaker.allows(100.0 + OPEN_S)
    breaker.begin()
    assert not breaker.allows(100.0 + OPEN_S)
    breaker.succeed()
    assert breaker.closed


def test_failed_trials_double_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 100.0 + OPEN_S, []
    for _ in range(8):
        breaker.begin()
        breaker.fail(now)
        begun = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - begun)
    assert pauses[:3] == [2 * OPEN_S, 4 * OPEN_S, 8 * OPEN_S]
    assert pauses[-1] == MAX_OPEN_S


def test_what_was_under_way_when_it_opened_does_not_keep_it_open() -> None:
    breaker = opened()
    for _ in range(50):
        breaker.fail(100.0 + OPEN_S / 2)
    assert breaker.allows(100.0 + OPEN_S)


def test_a_trial_that_says_nothing_leaves_room_for_another() -> None:
    breaker = opened()
    breaker.begin()
    breaker.forget()
    assert breaker.allows(100.0 + OPEN_S)

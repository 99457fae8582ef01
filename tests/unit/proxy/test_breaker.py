from __future__ import annotations

from bucket_lora_proxy.breaker import FAILURES, MAX_OPEN_S, OPEN_S, Breaker


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.begin() == 0
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
    trial = breaker.begin()
    assert not breaker.allows(100.0 + OPEN_S)
    breaker.succeed()
    breaker.end(trial)
    assert breaker.closed


def test_failed_trials_double_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(), 100.0 + OPEN_S, []
    for _ in range(8):
        trial = breaker.begin()
        breaker.fail(now, trial)
        breaker.end(trial)
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
    trial = breaker.begin()
    breaker.end(trial)
    assert breaker.allows(100.0 + OPEN_S)


def test_requests_beside_a_trial_neither_end_it_nor_make_the_pause_longer() -> None:
    breaker, now = opened(), 100.0 + OPEN_S
    trial = breaker.begin()
    assert breaker.begin() == 0  # there is no other replica
    breaker.fail(now)
    assert not breaker.allows(now)
    breaker.fail(now, trial)
    breaker.end(trial)
    assert not breaker.allows(now + 2 * OPEN_S - 0.01)
    assert breaker.allows(now + 2 * OPEN_S)


def test_a_trial_that_ends_after_others_closed_it_ends_no_later_trial() -> None:
    breaker, now = opened(), 100.0 + OPEN_S
    early = breaker.begin()
    breaker.succeed()  # one from before it opened
    for _ in range(FAILURES):
        breaker.fail(now)
    later = breaker.begin()
    breaker.end(early)
    assert not breaker.allows(now + OPEN_S)
    breaker.end(later)
    assert breaker.allows(now + OPEN_S)

from __future__ import annotations

import logging

import pytest

from adapter_bucket.errors import StoreUnavailable
from trl_async_bucket.watchdog import TELL_EVERY_S, StarvationWatchdog


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.fault: str | None = None
        self.asked = 0
        self.dog = StarvationWatchdog(self.replicas, limit_s=300, clock=lambda: self.now)

    def replicas(self) -> str | None:
        self.asked += 1
        return self.fault

    def wait(self, seconds: float, *, progress: int = 1) -> None:
        for _ in range(int(seconds // 5)):
            self.now += 5
            self.dog.waiting(progress)


def test_dead_replicas_end_the_training_by_name() -> None:
    world = World()
    world.wait(10)
    world.fault = "no replica behind http://p answers"
    world.wait(290)
    with pytest.raises(StoreUnavailable, match="no replica behind http://p answers"):
        world.wait(120)


def test_slow_generation_is_told_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING):
        world.wait(3600)
    assert 50 <= len(caplog.records) <= 60
    assert "generation itself is slow" in caplog.text


def test_replicas_that_come_back_in_time_are_forgiven() -> None:
    world = World()
    for _ in range(4):
        world.fault = "down"
        world.wait(200)
        world.fault = None
        world.wait(2 * TELL_EVERY_S)


def test_rollouts_that_trickle_in_are_progress() -> None:
    world = World()
    world.fault = "down"
    for progress in range(100):
        world.wait(30, progress=progress)
    assert world.asked == 0

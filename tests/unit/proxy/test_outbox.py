from __future__ import annotations

import asyncio
import logging

import pytest

from bucket_lora_proxy.outbox import Outbox


def test_with_little_to_do_each_write_goes_out_at_once() -> None:
    written: list[int] = []
    Outbox().add(lambda: written.append(1))
    assert written == [1]


def test_with_much_to_do_they_go_out_at_the_end_of_the_turn_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written: list[int] = []

    def fails() -> None:
        raise RuntimeError("no")

    async def turn() -> None:
        outbox = Outbox()
        outbox.gathers = True
        for number in range(3):
            outbox.add(lambda number=number: written.append(number))  # type: ignore[misc]
        outbox.add(fails)
        outbox.add(lambda: written.append(3))
        assert written == []
        await asyncio.sleep(0)
        assert written == [0, 1, 2, 3]
        outbox.add(lambda: written.append(4))
        await asyncio.sleep(0)
        assert written[4:] == [4]

    with caplog.at_level(logging.ERROR):
        asyncio.run(turn())
    assert "writing to a connection failed" in caplog.text

"""What was read ahead is handed out to the adapter it is of, and to no other one of its number."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vllm_bucket_lora.prepared import Prepared, PreparedAdapters


def read(name: str, path: str = "") -> Prepared:
    adapter: Future[Any] = Future()
    adapter.set_result(name)
    return Prepared(name, path or f"/adapters/{name}", adapter)


def test_an_adapter_is_handed_out_once() -> None:
    table = PreparedAdapters()
    table.put(7, read("run-v1"))
    taken = table.take(7, "run-v1", "/adapters/run-v1")
    assert taken is not None
    assert taken.result() == "run-v1"
    assert table.take(7, "run-v1", "/adapters/run-v1") is None


def test_another_adapter_of_the_number_gets_nothing_and_the_leftover_goes() -> None:
    table = PreparedAdapters()
    table.put(7, read("run-v1"))
    assert table.take(7, "run-v4097", "/adapters/run-v4097") is None
    assert 7 not in table
    table.put(7, read("run-v1"))
    assert table.take(7, "run-v1", "/elsewhere/run-v1") is None


def test_one_that_is_expected_is_not_read_again_and_another_one_is() -> None:
    table = PreparedAdapters()
    table.put(7, read("run-v1"))
    assert table.expects(7, "run-v1", "/adapters/run-v1")
    assert not table.expects(7, "run-v4097", "/adapters/run-v4097")
    assert table.find(7) is None


def test_a_dropped_one_is_not_read_any_more() -> None:
    table = PreparedAdapters()
    waiting: Future[Any] = Future()
    table.put(7, Prepared("run-v1", "/adapters/run-v1", waiting))
    table.drop(7)
    table.drop(8)
    assert waiting.cancelled()
    assert 7 not in table


def test_leftovers_make_room_oldest_first() -> None:
    table = PreparedAdapters()
    for number in range(6):
        table.make_room()
        table.put(number, read(f"run-v{number}"))
    assert [number for number in range(6) if number in table] == [2, 3, 4, 5]


def test_of_a_load_that_did_not_come_only_what_is_still_being_read_stays() -> None:
    table = PreparedAdapters()
    assert table.give_up(7) is None
    table.put(7, read("run-v1"))
    assert table.give_up(7) == "run-v1"
    assert 7 not in table
    reading: Future[Any] = Future()
    table.put(7, Prepared("run-v1", "/adapters/run-v1", reading))
    assert table.give_up(7) == "run-v1"
    assert table.expects(7, "run-v1", "/adapters/run-v1")
    assert not table.expects(7, "run-v4097", "/adapters/run-v4097")

"""Who gets adapter slots, which versions are loaded and retired."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapter_bucket.status import slots_needed
from vllm_bucket_lora.slots import Demand, admit, retired, to_load


def running(run_id: str, window: int = 3, *, idle: bool = False, at: float = 0.0) -> Demand:
    return Demand(run_id, running=True, window=window, idle=idle, newest_at=at)


def ended(run_id: str, at: float = 0.0) -> Demand:
    return Demand(run_id, running=False, window=3, newest_at=at)


def test_a_run_needs_its_window_and_one_slot_to_load_into() -> None:
    assert admit([running("a", 3)], 4, ()).keep == {"a": 3}
    refused = admit([running("a", 3)], 3, ()).refused["a"]
    assert "--max-loras 4" in refused


def test_the_second_run_is_refused_with_the_sum_of_both() -> None:
    admission = admit([running("b"), running("a")], 7, ("b",))
    assert admission.running == ("b",)
    assert "'b'" in admission.refused["a"]
    assert "--max-loras 8" in admission.refused["a"]


def test_an_admitted_run_keeps_its_slots_whatever_comes() -> None:
    admission = admit([running("z", at=1.0), running("a", at=9.0)], 4, ("z",))
    assert admission.running == ("z",)


def test_among_runs_seen_together_the_one_that_published_last_comes_first() -> None:
    assert admit([running("a", at=1.0), running("b", at=2.0)], 4, ()).running == ("b",)


def test_an_idle_run_gives_way_only_when_its_slots_are_needed() -> None:
    idle, new = running("dead", idle=True), running("new")
    assert admit([idle], 4, ("dead",)).running == ("dead",)
    assert set(admit([idle, new], 8, ("dead",)).keep) == {"dead", "new"}
    admission = admit([idle, new], 4, ("dead",))
    assert admission.running == ("new",)
    assert "dead" in admission.refused


def test_ended_runs_get_one_slot_each_of_what_is_left() -> None:
    admission = admit([ended("x", 1.0), ended("y", 2.0), running("a")], 5, ())
    assert admission.keep == {"a": 3, "y": 1}
    assert set(admission.unkept) == {"x"}


def test_nothing_is_retired_before_its_successor_is_loaded() -> None:
    assert retired([1, 2, 3], keep=3) == []
    assert retired([1, 2, 3, 4], keep=3) == [1]
    assert retired([1, 2], keep=0) == [1, 2]


def test_superseded_versions_are_skipped() -> None:
    assert to_load([3, 4, 5], loaded=[1, 2, 3], keep=3) == [5, 4]
    assert to_load([3, 4, 5], loaded=[], keep=1) == [5]
    assert to_load([3, 4, 5], loaded=[3], keep=3, unusable=[5]) == [4]


windows = st.integers(1, 8)


@given(
    st.lists(st.tuples(windows, st.booleans(), st.booleans()), max_size=8),
    st.integers(1, 40),
    st.permutations(range(8)),
)
def test_never_more_slots_are_given_than_there_are(
    wishes: list[tuple[int, bool, bool]], slots: int, order: list[int]
) -> None:
    demands = [
        Demand(f"r{i}", running=alive, window=window, idle=idle)
        for i, (window, alive, idle) in enumerate(wishes)
    ]
    admitted: tuple[str, ...] = ()
    for _ in range(3):
        admission = admit(demands, slots, admitted)
        alive = set(admission.running)
        used = sum(slots_needed(n) if run in alive else n for run, n in admission.keep.items())
        assert used <= slots
        known = {*admission.keep, *admission.refused, *admission.unkept}
        assert known == {demand.run_id for demand in demands}
        admitted = admission.running


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), windows)
def test_loading_and_retiring_end_in_the_newest_versions(
    published: set[int], loaded: set[int], keep: int
) -> None:
    newest = set(sorted(published)[-keep:])
    for _ in range(100):
        pending = to_load(published, loaded, keep)
        if pending:
            loaded = loaded | {pending[0]}
        loaded = loaded - set(retired(loaded, keep))
        assert len(loaded) <= keep
        if not pending:
            break
    assert all(version in loaded for version in newest if version >= min(loaded, default=0))

"""Errors that reach every rank, over a real two-process gloo group."""

from __future__ import annotations

import time

import pytest

from adapter_bucket.errors import BucketError, StoreUnavailable
from tests.unit.trl_async_bucket.rank_processes import as_ranks
from trl_async_bucket.ranks import RankFailed, all_ranks, from_rank_0


def fail_on(*failing: int) -> tuple[str, str, float]:
    """Type and text of what this rank raised, and how long it took to know."""
    import torch.distributed as dist

    started = time.monotonic()
    try:
        with all_ranks("publish"):
            if dist.get_rank() in failing:
                raise StoreUnavailable(f"bucket of rank {dist.get_rank()} is gone")
    except BucketError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def fail_then_go_on() -> list[str]:
    return [fail_on(0)[0], fail_on()[0], fail_on(1)[0], from_rank_0(fail_on()[0] + "same")]


def leave_rank_1_behind() -> str:
    """Rank 1 ends without entering, as a killed process would."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        return ""
    try:
        with all_ranks("publish"):
            pass
    except RankFailed as error:
        return str(error)
    return "nothing was noticed"


def share_what_rank_0_has() -> object:
    import torch.distributed as dist

    return from_rank_0({"dtype": "bfloat16"} if dist.get_rank() == 0 else None)


def test_an_error_on_rank_0_is_an_error_on_every_rank_at_once() -> None:
    (own, own_text, _), (other, other_text, seconds) = as_ranks(2, fail_on, 0)
    assert (own, own_text) == ("StoreUnavailable", "bucket of rank 0 is gone")
    assert other == "RankFailed"
    assert other_text == ("publish: rank 0 failed: StoreUnavailable: bucket of rank 0 is gone")
    assert seconds < 5


def test_an_error_on_another_rank_reaches_rank_0() -> None:
    results = as_ranks(2, fail_on, 1)
    assert [name for name, _, _ in results] == ["RankFailed", "StoreUnavailable"]


def test_each_failing_rank_raises_its_own_error() -> None:
    results = as_ranks(2, fail_on, 0, 1)
    assert [text for _, text, _ in results] == [f"bucket of rank {r} is gone" for r in (0, 1)]


def test_ranks_stay_in_step_after_an_error() -> None:
    assert as_ranks(2, fail_then_go_on) == [
        ["StoreUnavailable", "", "RankFailed", "same"],
        ["RankFailed", "", "StoreUnavailable", "same"],
    ]


def test_a_rank_that_ended_is_noticed() -> None:
    noticed, _ = as_ranks(2, leave_rank_1_behind)
    assert "another rank ended" in noticed


def test_rank_0_shares_its_value() -> None:
    assert as_ranks(2, share_what_rank_0_has) == [{"dtype": "bfloat16"}] * 2


def test_one_process_needs_no_process_group() -> None:
    assert from_rank_0(7) == 7
    with pytest.raises(StoreUnavailable, match="gone"), all_ranks("publish"):
        raise StoreUnavailable("gone")

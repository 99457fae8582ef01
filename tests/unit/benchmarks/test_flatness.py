"""What the soak calls flat, on courses whose cause is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.flatness import LIMIT_MIB, Stretch, judge

VERSIONS = 150
ADAPTER_MIB = 120 / 1024


def course(mib: Callable[[float], float], *, noise: float = 1.5, points: int = 300) -> Stretch:
    """Memory as a function of the share of the way, with noise."""
    draw = random.Random(0)
    shares = [number / (points - 1) for number in range(points)]
    return Stretch(
        [share * VERSIONS for share in shares],
        [mib(share) + draw.gauss(0, noise) for share in shares],
    )


def test_memory_that_only_trembles_is_flat() -> None:
    assert judge(course(lambda _: 900)).flat


def test_one_kept_adapter_a_version_is_not() -> None:
    leak = judge(course(lambda share: 900 + share * VERSIONS * ADAPTER_MIB))
    assert not leak.flat
    assert leak.grown_mib == pytest.approx(VERSIONS * ADAPTER_MIB, rel=0.1)


def test_a_leak_under_a_saw_of_an_allocator_is_seen() -> None:
    assert not judge(course(lambda share: 900 + 20 * share + 8 * (share * 12 % 1))).flat


def test_an_allocator_that_takes_one_more_piece_is_flat() -> None:
    assert judge(course(lambda share: 900 + (64 if share > 0.2 else 0))).flat


def test_memory_that_shrinks_is_flat() -> None:
    assert judge(course(lambda share: 900 - 50 * share)).flat


def test_growth_that_comes_without_versions_too_is_not_the_versions_doing() -> None:
    growing = course(lambda share: 900 + 60 * share)
    verdict = judge(growing, course(lambda share: 800 + 60 * share))
    assert verdict.flat
    assert verdict.grown_mib == pytest.approx(60, rel=0.1)
    assert not judge(growing, course(lambda share: 800 + 40 * share)).flat


def test_of_two_stretches_without_versions_the_flatter_one_counts() -> None:
    """A warm-up before must not excuse what comes after it."""
    warming_up, after = course(lambda share: 500 + 300 * share), course(lambda _: 900)
    assert not judge(course(lambda share: 900 + 20 * share), warming_up, after).flat


def test_a_stretch_without_versions_in_which_memory_shrinks_is_no_reproach() -> None:
    verdict = judge(course(lambda _: 900), course(lambda share: 900 - 90 * share))
    assert verdict.anyway_mib == 0
    assert verdict.flat


def test_the_limit_is_below_what_a_copy_of_each_version_takes() -> None:
    assert LIMIT_MIB < VERSIONS * ADAPTER_MIB

from __future__ import annotations

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.ready_policy import MAX_QUORUM, ReadyPolicy


@pytest.mark.parametrize(
    ("text", "need", "of_three"),
    [("any", "any", 1), ("all", "all", 3), ("quorum:2", "2", 2), ("quorum:7", "7", 7)],
)
def test_a_policy_survives_the_way_over_the_wire(text: str, need: str, of_three: int) -> None:
    policy = ReadyPolicy.parse(text)
    assert (str(policy), policy.need, policy.required(3)) == (text, need, of_three)
    assert ReadyPolicy.from_need(need) == policy


def test_nothing_is_waited_for_only_where_the_config_says_so() -> None:
    assert ReadyPolicy.parse("none").required(3) == 0
    with pytest.raises(ConfigError):
        ReadyPolicy.from_need("none")


@pytest.mark.parametrize("text", ["most", "quorum:", "quorum:0", "quorum:-1", "quorum:x", "2", ""])
def test_another_policy_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="bucket_ready="):
        ReadyPolicy.parse(text)


def test_a_quorum_has_a_limit() -> None:
    assert ReadyPolicy.from_need(str(MAX_QUORUM)).count == MAX_QUORUM
    with pytest.raises(ConfigError, match=str(MAX_QUORUM)):
        ReadyPolicy.from_need(str(MAX_QUORUM + 1))

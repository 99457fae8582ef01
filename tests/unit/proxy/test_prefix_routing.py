from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from bucket_lora_proxy.prefix import MAX_HASHED_BYTES, MAX_MEMO, Hasher, Prompt
from bucket_lora_proxy.prefix_index import DEFAULT_BLOCKS, MAX_BLOCKS, PrefixIndex
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.routing import choose
from bucket_lora_proxy.watcher import cache_blocks
from hypothesis import given
from hypothesis import strategies as st

IDS = list(range(1000, 1100))


def prompt(content: object, name: str | None = "run-v1", decode: int = 100) -> Prompt:
    return described_by(Hasher(), content, name, decode)


def described_by(
    hasher: Hasher, content: object, name: str | None = "run-v1", decode: int = 100
) -> Prompt:
    return hasher.prompt(name, json.dumps(content).encode(), decode)


# --- chains ---


def test_a_chain_has_one_hash_for_every_16_whole_tokens() -> None:
    described = prompt(IDS)
    assert (described.tokens, [len(chain) for chain in described.chains]) == (100, [6])


def test_an_extended_prompt_begins_with_the_same_chain() -> None:
    short, long = prompt(IDS).chains[0], prompt([*IDS, *range(50)]).chains[0]
    assert long[: len(short)] == short
    assert len(long) == 9


def test_a_difference_changes_its_block_and_all_after_it() -> None:
    other = list(IDS)
    other[40] += 1
    one, two = prompt(IDS).chains[0], prompt(other).chains[0]
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True] + [False] * 4


def test_versions_and_base_model_share_no_block() -> None:
    chains = [set(prompt(IDS, name).chains[0]) for name in ("run-v1", "run-v2", None)]
    assert not chains[0] & chains[1]
    assert not chains[0] & chains[2]


def test_text_counts_four_bytes_a_token() -> None:
    described = prompt("word " * 64)
    assert (described.tokens, len(described.chains[0])) == (80, 5)


def test_the_next_turn_of_a_chat_begins_with_the_same_chain() -> None:
    first = [{"role": "user", "content": "x" * 400}]
    second = [*first, {"role": "assistant", "content": "y" * 400}]
    one, two = prompt(first).chains[0], prompt(second).chains[0]
    assert two[: len(one)] == one


def test_a_batched_request_has_a_chain_for_each_prompt() -> None:
    assert [len(chain) for chain in prompt([IDS, IDS[:32]]).chains] == [6, 2]
    assert [len(chain) for chain in prompt(["x" * 64, "y" * 128]).chains] == [1, 2]


@pytest.mark.parametrize(
    "content", [None, [], {}, 5, [1, "a"], [2**40], [[1, None]], [["a"]], [True], [[]], ""]
)
def test_what_is_no_prompt_has_no_blocks(content: object) -> None:
    assert not any(prompt(content).chains)


def test_compact_json_has_as_many_blocks_and_the_same_prefixes() -> None:
    compact = json.dumps(IDS, separators=(",", ":")).encode()
    short = json.dumps(IDS[:48], separators=(",", ":")).encode()
    one, two = (Hasher().prompt("run-v1", content, 1) for content in (compact, short))
    assert (one.tokens, len(one.chains[0])) == (100, 6)
    assert one.chains[0][:3] == two.chains[0]


def test_of_a_huge_prompt_only_the_beginning_is_hashed() -> None:
    described = prompt([7] * (MAX_HASHED_BYTES // 4 + 16_000))
    assert described.tokens == MAX_HASHED_BYTES // 4 + 16_000
    assert len(described.chains[0]) == MAX_HASHED_BYTES // 64


def test_the_memo_changes_nothing_and_is_bounded() -> None:
    hasher = Hasher()
    for seed in range(MAX_MEMO + 50):
        described_by(hasher, [seed] * 16)
    assert described_by(hasher, IDS) == described_by(hasher, IDS) == prompt(IDS)
    assert len(hasher._memo) <= MAX_MEMO


# --- index ---


def test_each_replica_is_known_by_what_it_was_sent() -> None:
    index = PrefixIndex(3)
    index.add(0, prompt(IDS))
    index.add(1, prompt(IDS[:48]))
    assert index.matched(prompt(IDS), [0, 1, 2]) == [6, 3, 0]
    assert index.matched(prompt(IDS[:48]), [2, 1, 0]) == [0, 3, 3]
    assert index.matched(prompt(IDS, "run-v2"), [0, 1, 2]) == [0, 0, 0]
    assert index.matched(prompt([IDS, IDS[:48]]), [0, 1]) == [9, 6]


def test_a_full_cache_forgets_ends_of_the_oldest_first() -> None:
    index = PrefixIndex(1)
    index.set_capacity(0, 8)
    old, new = prompt(IDS), prompt([7] * 64)
    index.add(0, old)
    index.add(0, new)
    assert index.matched(new, [0]) == [4]
    assert index.matched(old, [0]) == [4]
    index.add(0, old)
    assert index.matched(old, [0]) == [6]
    assert index.blocks(0) == 8


def test_an_old_versions_blocks_go_before_a_newer_ones() -> None:
    index = PrefixIndex(1)
    index.set_capacity(0, 9)
    index.add(0, prompt(IDS, "run-v1"))
    index.add(0, prompt(IDS, "run-v2"))
    assert index.matched(prompt(IDS, "run-v2"), [0]) == [6]
    assert index.matched(prompt(IDS, "run-v1"), [0]) == [3]


def test_a_restarted_replica_holds_nothing_and_the_others_keep_theirs() -> None:
    index = PrefixIndex(2)
    index.add(0, prompt(IDS))
    index.add(1, prompt(IDS))
    index.drop_slot(0)
    assert index.matched(prompt(IDS), [0, 1]) == [0, 6]
    index.add(0, prompt(IDS))
    assert index.matched(prompt(IDS), [0, 1]) == [6, 6]


def test_a_retired_version_leaves_nothing_behind() -> None:
    index = PrefixIndex(2)
    for name in ("run-v1", "run-v2"):
        index.add(0, prompt(IDS, name))
    index.drop_name("run-v1")
    assert index.names() == {"run-v2"}
    assert index.blocks(0) == 6
    assert index.matched(prompt(IDS, "run-v1"), [0]) == [0]


def test_capacity_is_what_the_replica_tells_within_a_bound() -> None:
    page = (
        '# HELP vllm:cache_config_info x\nvllm:cache_config_info{block_size="32",'
        'engine="0",num_gpu_blocks="1000"} 1.0\n'
    )
    assert cache_blocks(page) == 2000
    assert cache_blocks("") is None
    assert cache_blocks(page.replace('"1000"', '"None"')) is None
    index = PrefixIndex(1)
    index.set_capacity(0, None)
    assert index._capacity == [DEFAULT_BLOCKS]
    index.set_capacity(0, 10**9)
    assert index._capacity == [MAX_BLOCKS]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop_slot", "drop_name"]),
            st.integers(0, 2),
            st.sampled_from(["run-v1", "run-v2"]),
            st.lists(st.integers(0, 1), min_size=0, max_size=6),
        ),
        max_size=40,
    )
)
def test_the_index_agrees_with_plain_sets_of_blocks(
    steps: list[tuple[str, int, str, list[int]]],
) -> None:
    index = PrefixIndex(3)
    for slot in range(3):
        index.set_capacity(slot, 12)
    asked = [prompt([bit] * 16 * 3, name) for bit in (0, 1) for name in ("run-v1", "run-v2")]
    for action, slot, name, bits in steps:
        described = prompt([bit for bit in bits for _ in range(16)], name)
        asked.append(described)
        if action == "add":
            index.add(slot, described)
            expected = len(described.chains[0]) if described.chains else 0
            assert index.matched(described, [slot]) == [expected]
        elif action == "drop_slot":
            index.drop_slot(slot)
        else:
            index.drop_name(name)
        held = [
            {block for recency in names.values() for block in recency} for names in index._recency
        ]
        for described in asked:
            chain = described.chains[0] if described.chains else ()
            for number in range(3):
                prefix = next((i for i, b in enumerate(chain) if b not in held[number]), len(chain))
                assert index.matched(described, [number]) == [prefix]
        assert [index.blocks(number) for number in range(3)] == [len(blocks) for blocks in held]
        masks = {b: m for holders in index._holders.values() for b, m in holders.items()}
        assert all(masks.values())
        assert set(masks) == set().union(*held)


# --- cost rule ---


def pick(loads: Sequence[float], matched: Sequence[int], **more: object) -> int | None:
    given: dict[str, object] = {"prompt_tokens": 200, "decode_tokens": 300} | more
    return choose(loads=loads, matched_tokens=matched, **given)  # type: ignore[arg-type]


def test_without_any_prefix_the_least_loaded_is_chosen() -> None:
    assert pick([900, 500, 700], [0, 0, 0]) == 1


def test_a_shared_template_does_not_hold_requests_on_a_loaded_replica() -> None:
    assert pick([20_000, 10_000], [16, 0]) == 1


def test_a_whole_prompt_does() -> None:
    assert pick([20_000, 10_000], [192, 0]) == 0


@pytest.mark.parametrize("count", [2, 3, 16])
def test_a_hot_prefix_cannot_pin_everything_to_one_replica(count: int) -> None:
    assert pick([50_000] + [0] * (count - 1), [192] + [0] * (count - 1)) != 0


def test_an_overloaded_holder_spills() -> None:
    assert pick([100_000, 0], [192, 0]) == 1


def test_a_group_stays_together_on_an_otherwise_idle_fleet() -> None:
    work = 500.0
    for already in range(1, 16):
        assert pick([already * work, 0, 0, 0], [192, 0, 0, 0]) == 0


def test_ties_take_turns() -> None:
    assert [pick([0, 0, 0], [0, 0, 0], turn=turn) for turn in range(4)] == [0, 1, 2, 0]


def test_a_replica_that_failed_the_request_is_the_last_resort() -> None:
    assert pick([0, 900], [192, 0], passed_over=[True, False]) == 1
    assert pick([0, 900], [192, 0], passed_over=[True, True]) == 0
    assert pick([], []) is None
    assert pick([5], [0], passed_over=[True]) == 0


def test_an_empty_prompt_is_balanced_too() -> None:
    assert pick([10_000, 0], [0, 0], prompt_tokens=0) == 1


# --- router ---


@dataclass(eq=False)
class Bare:
    slot: int
    outstanding: float = 0.0


def test_a_group_goes_to_one_replica_and_groups_are_spread() -> None:
    router, fleet = Router(4), [Bare(slot) for slot in range(4)]
    chosen = []
    for group in range(8):
        described = prompt([group * 7 + i for i in range(200)])
        for number in range(8):
            choice = router.pick(fleet, described)
            assert choice is not None
            assert choice.outcome == ("hit" if number else "new")
            work = router.begin(choice, described)
            chosen.append((group, choice.replica.slot))
            router.end(choice, work)
    assert len(set(chosen)) == 8
    assert sorted(slot for _, slot in set(chosen)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_slot_is_used_again_and_nothing_of_its_last_replica_is_left() -> None:
    router = Router(0)
    first, second = Bare(router.take_slot()), Bare(router.take_slot())
    choice = router.pick([first], prompt(IDS))
    assert choice is not None
    router.end(choice, router.begin(choice, prompt(IDS)))
    router.free_slot(first.slot)
    third, fourth = Bare(router.take_slot()), Bare(router.take_slot())
    assert (third.slot, second.slot, fourth.slot) == (first.slot, 1, 2)
    choice = router.pick([third, fourth], prompt(IDS))
    assert choice is not None
    assert choice.outcome == "new"
    assert router.index.blocks(third.slot) == 0


def test_outstanding_work_is_what_is_not_cached_and_may_be_decoded() -> None:
    router, replica = Router(1), Bare(0)
    outstanding = []
    for _ in range(2):
        choice = router.pick([replica], prompt(IDS))
        assert choice is not None
        work = router.begin(choice, prompt(IDS))
        outstanding.append(replica.outstanding)
        router.end(choice, work)
    assert outstanding == [200, 104]  # six of its blocks are cached the second time
    assert replica.outstanding == 0


def test_a_decision_about_2048_tokens_among_16_replicas_takes_at_most_100_us() -> None:
    router, hasher, fleet = Router(16), Hasher(), [Bare(slot) for slot in range(16)]
    rng = random.Random(1)
    template = [rng.randrange(32_000) for _ in range(23)]
    prompts = [template + [rng.randrange(32_000) for _ in range(2025)] for _ in range(24)]
    contents = [json.dumps(ids).encode() for ids in prompts]
    took = []
    for content in contents:
        for _ in range(8):
            begun = time.perf_counter()
            described = hasher.prompt("run-v1", content, 300)
            choice = router.pick(fleet, described)
            assert choice is not None
            router.end(choice, router.begin(choice, described))
            took.append(time.perf_counter() - begun)
    took.sort()
    # The median of a group's requests. A prompt's first request hashes it: 1 of 8.
    assert took[len(took) // 2] < 100e-6, [f"{seconds * 1e6:.0f}" for seconds in took[::16]]

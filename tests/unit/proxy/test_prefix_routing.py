from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_lora_proxy.prefix import MAX_HASHED_BYTES, MAX_MEMO, Hasher, Prompt
from bucket_lora_proxy.prefix_index import DEFAULT_BLOCKS, MAX_BLOCKS, PrefixIndex, _Node
from bucket_lora_proxy.watcher import cache_blocks

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


def test_the_memo_is_bounded_by_what_long_prompts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucket_lora_proxy.prefix.MAX_MEMO_BLOCKS", 100)
    hasher = Hasher()
    for seed in range(50):
        described_by(hasher, [seed] * 160)
        described_by(hasher, [[seed] * 16, [seed + 1] * 16])
        described_by(hasher, ["", str(seed)])
    assert 80 < hasher._blocks <= 100
    assert sum(len(chain) for _, chains in hasher._memo.values() for chain in chains) <= 100
    huge = [1] * 16 * 101  # alone above the limit
    assert described_by(hasher, huge) == prompt(huge)
    assert (hasher._memo, hasher._blocks) == ({}, 0)


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


def test_nothing_of_a_retired_version_waits_for_the_collector_of_cycles() -> None:
    def nodes() -> int:
        # Not isinstance: it asks deprecated names of other tests' packages, and they warn.
        return sum(type(one) is _Node for one in gc.get_objects())

    index = PrefixIndex(2)
    gc.collect()
    before = nodes()
    gc.disable()
    try:
        for number in range(20):
            index.add(number % 2, prompt([*IDS[:32], *[number] * 32]))
        assert nodes() > before + 20
        index.drop_name("run-v1")
        assert nodes() == before
    finally:
        gc.enable()


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
        held = [held_by(index, number) for number in range(3)]
        for described in asked:
            chain = described.chains[0] if described.chains else ()
            for number in range(3):
                prefix = next((i for i, b in enumerate(chain) if b not in held[number]), len(chain))
                assert index.matched(described, [number]) == [prefix]
        assert [index.blocks(number) for number in range(3)] == [len(blocks) for blocks in held]
        for name in index.names():
            check_tree(index, name)


def nodes_of(root: _Node) -> Iterator[_Node]:
    for child in root.children.values():
        yield child
        yield from nodes_of(child)


def held_by(index: PrefixIndex, slot: int) -> set[int]:
    return {
        block
        for root in index._roots.values()
        for node in nodes_of(root)
        for block in node.blocks[: node.held.get(slot, 0)]
    }


def check_tree(index: PrefixIndex, name: str) -> None:
    """Nothing is kept that no replica holds, and a replica's order has parents last."""
    nodes = list(nodes_of(index._roots[name]))
    assert nodes
    for node in nodes:
        assert len(node.blocks) == max(node.held.values())
        for child in node.children.values():
            assert all(node.held[slot] == len(node.blocks) for slot in child.held)
    for slot, caches in enumerate(index._caches):
        if name not in caches:
            assert not any(slot in node.held for node in nodes)
            continue
        order = list(caches[name].order)
        assert set(order) == {node for node in nodes if slot in node.held}
        assert caches[name].count == sum(node.held[slot] for node in order)
        for place, node in enumerate(order):
            assert node.parent not in order[:place]

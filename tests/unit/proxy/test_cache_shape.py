from __future__ import annotations

from bucket_lora_proxy.prefix import Prompt
from bucket_lora_proxy.prefix_index import PrefixIndex
from bucket_lora_proxy.router import Router
from bucket_lora_proxy.watcher import block_tokens, cache_blocks

PAGE = (
    'vllm:other{block_size="7"} 1.0\n'
    'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="50",'
    'mamba_block_size="None"} 1.0\n'
)


def prompt(blocks: int) -> Prompt:
    return Prompt("run-v1", blocks * 16, 16, (tuple(range(blocks)),))


def test_block_size_and_capacity_are_read_from_a_replicas_metrics() -> None:
    assert (block_tokens(PAGE), cache_blocks(PAGE)) == (128, 400)
    assert block_tokens(PAGE.replace('"50"', '"None"')) == 128
    for page in ("", "garbage", PAGE.replace('"128"', '"None"'), "vllm:cache_config_info{"):
        assert block_tokens(page) is cache_blocks(page) is None


def test_a_match_below_a_block_of_the_replica_is_worth_nothing() -> None:
    """With blocks of 128 tokens a shared template of 23 is never in the cache."""
    index = PrefixIndex(2)
    index.set_block_tokens(1, 128)
    for slot in (0, 1):
        index.add(slot, prompt(20))
    assert index.matched(prompt(1), [0, 1]) == [1, 0]
    assert index.matched(prompt(7), [0, 1]) == [7, 0]
    assert index.matched(prompt(17), [1, 0]) == [16, 17]
    index.set_block_tokens(1, None)
    assert index.matched(prompt(17), [1, 0]) == [17, 17]


def test_a_slot_that_is_used_again_has_no_shape() -> None:
    router = Router(1)
    router.index.set_block_tokens(0, 128)
    router.free_slot(0)
    slot = router.take_slot()
    router.index.add(slot, prompt(3))
    assert router.index.matched(prompt(3), [slot]) == [3]

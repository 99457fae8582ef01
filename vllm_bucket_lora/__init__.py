"""The vLLM side: follow runs in a bucket and serve each version of their LoRA adapters by name.

``plugin`` switches it on in ``vllm serve``, ``watcher`` decides when to look and what to load,
``engine`` and ``worker`` are the only modules that know vLLM's internals, ``endpoints`` answers
``/bucket_lora/status``. ``follow`` does the same for the offline ``LLM`` class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_bucket_lora.offline import Follower

__all__ = ["follow"]


def follow(llm: Any, url: str, run_id: str, **settings: Any) -> Follower:
    """Generate with a run's newest version in a notebook or an evaluation job.

    See ``vllm_bucket_lora.offline.follow``, which this calls: importing the package must not load
    vLLM.
    """
    from vllm_bucket_lora import offline

    return offline.follow(llm, url, run_id, **settings)

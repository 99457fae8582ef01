"""The vLLM side: follow runs in a bucket and serve each version of their LoRA adapters by name.

``plugin`` switches it on, ``watcher`` decides when to look and what to load, ``engine`` is the only
module that knows vLLM, ``endpoints`` answers ``/bucket_lora/status``.
"""

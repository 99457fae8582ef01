"""Starts runs on machines: ``python -m trl_async_bucket.launch``.

``hf_jobs`` and what it is made of start a whole run on Hugging Face Jobs; ``with_proxy`` runs a
training command with the proxy beside it, on any machine. Nothing here imports torch or TRL.
"""

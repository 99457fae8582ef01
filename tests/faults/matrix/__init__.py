"""The fault matrix: a real run meets every fault in every phase, and records prove what came of it.

``python -m tests.faults.matrix --help``. Where to begin reading: ``cells`` (what is done), ``run``
(how), ``checker`` (what must hold). Every process is real and its own: trainer, rollout worker, two
vLLM replicas, proxy, S3 server. Between them stand links of this package (``links``), which fail on
command and record what passes.
"""

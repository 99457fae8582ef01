"""Writes the CPU section of ``docs/performance.md`` from the JSON in ``benchmarks/results``.

``make bench-report``. Takes no figures itself, and imports no torch.
"""

"""Benchmarks for a machine with an NVIDIA GPU; each also runs on a CPU with ``--tiny``."""

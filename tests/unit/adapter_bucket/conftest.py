"""Bounds of the property tests: few examples, the same ones in every run, no time limit each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "contract",
    max_examples=60,
    deadline=None,  # a busy machine is no fault of the code
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("contract")

"""Bounds of the property tests: the same examples in every run, no time limit each."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("plugin", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("plugin")

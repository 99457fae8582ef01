"""What all documents in the bucket have in common: how strictly they are read. Pure."""

from __future__ import annotations

from pydantic import ConfigDict

READABLE = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
"""Unknown fields are kept and ignored, so that a newer minor writer can add optional ones."""

MAX_INT = 2**53
"""Largest integer that every JSON reader holds exactly."""

"""Checking that the installed TRL has what the drop-ins override. Imports no TRL.

A TRL that lacks any of it is refused at import of the drop-ins, with the tested range, instead of
training with a sync that never runs. What is checked is the seam itself, not the version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from adapter_bucket.errors import UnsupportedUpstream

TESTED_TRL = ("1.14.2", "1.15.0", "1.16.0")
"""TRL releases on which the integration tests pass."""


def installed_trl() -> str:
    """Version of the installed TRL.

    Raises:
        UnsupportedUpstream: TRL is not installed.
    """
    try:
        return version("trl")
    except PackageNotFoundError:
        raise UnsupportedUpstream(
            f"trl is not installed; install trl-async-bucket[trl] (tested: {tested()})"
        ) from None


def check_methods(owner: type, expected: Mapping[str, Sequence[str]]) -> None:
    """Check that a class has methods with these parameters, and no others.

    Raises:
        UnsupportedUpstream: one is missing or takes other parameters.
    """
    for name, parameters in expected.items():
        method = getattr(owner, name, None)
        actual = list(inspect.signature(method).parameters) if method else None
        if actual != list(parameters):
            found = "it is missing" if actual is None else f"it takes {', '.join(actual)}"
            raise unsupported(f"{owner.__name__}.{name} should take {list(parameters)}: {found}")


def check_source(function: Callable[..., Any], marks: Iterable[str]) -> None:
    """Check that a function is written around these pieces of code.

    For what an override relies on and no signature shows: which name is looked up, what is called.

    Raises:
        UnsupportedUpstream: a piece is not there, or the source cannot be read.
    """
    name = function.__qualname__
    try:
        source = inspect.getsource(function)
    except OSError:
        raise unsupported(f"the source of {name} cannot be read") from None
    for mark in marks:
        if mark not in source:
            raise unsupported(f"{name} is not built around {mark!r}")


def unsupported(what: str) -> UnsupportedUpstream:
    """The error that lists the tested versions."""
    return UnsupportedUpstream(
        f"trl {installed_trl()} is not supported for weight_sync='bucket': {what}. Install a "
        f"tested version: {tested()}"
    )


def tested() -> str:
    """The tested versions, for a message."""
    return ", ".join(f"trl=={release}" for release in TESTED_TRL)

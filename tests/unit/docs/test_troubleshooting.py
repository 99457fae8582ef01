"""docs/troubleshooting.md has an entry for every error text of the code, and no entry for none."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from scripts.error_texts import GAP, error_texts, texts_of
from tests.unit.docs.conftest import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
MIN_LETTERS = 12
"""An entry may leave out the end of a text if it has this many letters of its own."""


all_texts = cache(error_texts)


def entries() -> list[str]:
    """The message templates in the first column of the page's tables."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    return [entry for row in rows for entry in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def matches(entry: str, template: str) -> bool:
    """Whether the entry stands for the template: they are equal, but the entry may end early."""
    if entry.endswith(GAP) and sum(map(str.isalpha, entry)) >= MIN_LETTERS:
        return template.startswith(entry.removesuffix(GAP))
    return entry == template


def test_every_error_text_has_an_entry() -> None:
    known = entries()
    texts = all_texts()
    assert len(texts) > 300, "the texts are not found any more"
    missing = [
        f"{text.place}: {text.template}"
        for text in texts
        if not any(matches(entry, text.template) for entry in known)
    ]
    assert not missing, (
        "these error texts have no entry in docs/troubleshooting.md; add a row, or the text to the "
        "row with the same cause (… stands for what varies):\n" + "\n".join(missing)
    )


def test_no_entry_is_left_of_an_error_that_is_gone() -> None:
    texts = [text.template for text in all_texts()]
    not_ours = {"unrecognized arguments: --plugin=bucket-lora"}  # vLLM's own words
    stale = [
        entry
        for entry in entries()
        if entry not in not_ours and not any(matches(entry, text) for text in texts)
    ]
    assert not stale, f"no error of the code reads like these entries: {stale}"


def test_an_entry_is_a_text_or_the_beginning_of_one() -> None:
    assert matches("the lock of … is busy", "the lock of … is busy")
    assert matches("the lock of … is busy; …", "the lock of … is busy; repeat")
    assert not matches("the lock of … is busy", "the lock of … is busy; repeat")
    assert not matches("… is …; …", "… is …; use a number")


@pytest.mark.parametrize(
    ("source", "template"),
    [
        ('raise ConfigError(f"{name}={value!r} must be at least {low}")', "…=… must be at least …"),
        ('def _gone(x) -> NotPublished:\n    return NotPublished(f"{x} is" " gone")', "… is gone"),
        ('logger.error("publishing %d failed: %s", 1, e)', "publishing … failed: …"),
        ('def run_fault(x):\n    return f"the base model is {x}"', "the base model is …"),
        ('TEXT = "set it now"\nraise ValueError(TEXT)', "set it now"),
    ],
)
def test_error_texts_are_found(source: str, template: str) -> None:
    found = texts_of(ast.parse(source), {"ConfigError", "NotPublished", "ValueError"})
    assert template in [text for text, _ in found]

"""What the demo's policy learns: to answer with the letter it was asked for.

Module-level functions only: TRL's rollout worker is a spawned process and imports them by name.
"""

from __future__ import annotations

from typing import Any

LETTERS = "abcdefghij"
ANSWER_CHARS = 12
"""Length of the answers the base model gives; shorter ones earn in proportion."""

MAX_COMPLETION_TOKENS = 16


def prompt_for(letter: str) -> list[dict[str, str]]:
    """The chat that asks for ``letter``."""
    return [{"role": "user", "content": f"say {letter}"}]


def letter_share(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """Reward: share of the answer's characters that are the letter asked for, 0 to 1."""
    rewards = []
    for completion, chat in zip(completions, prompts, strict=True):
        letter = chat[-1]["content"][-1]
        text = completion[-1].get("content") or ""
        rewards.append(text.count(letter) / max(len(text), ANSWER_CHARS))
    return rewards


def prompt_rows() -> list[dict[str, Any]]:
    """The training prompts, one per letter."""
    return [{"prompt": prompt_for(letter)} for letter in LETTERS]

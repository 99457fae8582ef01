"""The parts of the examples that decide what is learnt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from examples import gsm8k_math, tool_agent


def said(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "solution", "reward"),
    [
        ("3 + 4 = 7\n#### 7", "Tom has 3 + 4 = <<3+4=7>>7.\n#### 7", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("#### 7.0", "#### 7", 1.0),
        ("#### 8\nno:\n#### 7", "#### 7", 1.0),
        ("the answer is 7", "#### 7", 0.0),
        ("#### 70", "#### 7", 0.0),
        (None, "#### 7", 0.0),
    ],
)
def test_the_number_after_the_mark_counts(text: str | None, solution: str, reward: float) -> None:
    assert gsm8k_math.right_answer([said(text)], [solution]) == [reward]


def test_an_agent_is_rewarded_for_the_number_and_a_little_for_asking() -> None:
    call = {"role": "tool", "name": "stock", "content": "96"}
    conversations = [
        [*said(""), call, *said("There are 96.")],
        [*said(""), call, *said("There are 960.")],
        said("96"),
        said("I do not know."),
    ]
    assert tool_agent.found_it(conversations, ["96"] * 4) == [1.0, 0.2, 1.0, 0.0]


def test_every_question_has_the_answer_that_the_tools_give() -> None:
    for row in tool_agent.questions(50):
        text = row["prompt"][0]["content"]
        (article,) = [name for name in tool_agent.STOCK if name in text]
        number = int(tool_agent.stock(article))
        if "worth" in text:
            number *= int(tool_agent.price(article))
        assert row["answer"] == str(number)


# TRL says at import that its experimental trainers may change: known, and pinned.
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("example", [gsm8k_math, tool_agent])
def test_every_setting_of_a_recipe_exists(example: Any) -> None:
    from trl_async_bucket import AsyncGRPOConfig

    known = {field.name for field in dataclasses.fields(AsyncGRPOConfig)}
    assert set(example.RECIPE) <= known

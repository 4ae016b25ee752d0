from __future__ import annotations

import pytest

from megalight.errors import ConfigurationError
from megalight.rl.environment import Answer
from megalight.rl.rewards import Pattern

FORM = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.mark.parametrize(
    ("text", "whole", "part"),
    [
        ("<think>a\nb</think>\n<answer>1</answer>", 1.0, 1.0),
        ("  <think></think><answer></answer>\n", 1.0, 1.0),
        ("so <think>a</think><answer>1</answer>", 0.0, 1.0),
        ("<answer>1</answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_form_of_an_answer(text: str, whole: float, part: float) -> None:
    answer = Answer(text, (), "end")
    assert Pattern(FORM)(answer, {}) == whole
    assert Pattern(FORM, whole=False)(answer, {}) == part


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no regular expression"):
        Pattern("(")

from __future__ import annotations

from typing import Any

import pytest

from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Answer
from megalight.rl.rewards import FinalAnswer, Pattern, RowFilter, SoftOverlong


@pytest.mark.parametrize(("length", "value"), [(0, 0), (8, 0), (9, -0.25), (10, -0.5), (12, -1), (99, -1)])
def test_the_penalty_grows_in_the_buffer(length: int, value: float) -> None:
    assert SoftOverlong(longest=12, buffer=4)(Answer("", [1] * length, "length"), {}) == value


@pytest.mark.parametrize("buffer", [0, -1, 13])
def test_a_buffer_is_within_the_longest(buffer: int) -> None:
    with pytest.raises(ConfigurationError, match="buffer is"):
        SoftOverlong(longest=12, buffer=buffer)


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


REWARD = RowFilter(column="kind", equals="sum", reward=FinalAnswer(wrong=-1.0))


def test_only_rows_of_the_kind_have_the_reward() -> None:
    answer = Answer("it is 5", (), "end")
    assert REWARD(answer, {"kind": "sum", "answer": 5}) == 1.0
    assert REWARD(answer, {"kind": "sum", "answer": 6}) == -1.0
    assert REWARD(answer, {"kind": "puzzle"}) == 0.0


@pytest.mark.parametrize("row", [{"answer": 5}, {"kinds": "sum", "answer": 5}, {"kind": "sum"}])
def test_rows_are_checked_before_work(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the row has no"):
        REWARD.check(row)


def test_rows_of_other_kinds_need_no_answer() -> None:
    REWARD.check({"kind": "puzzle"})
    RowFilter(column="kind", equals=1, reward=lambda answer, row: 1.0).check({"kind": 1})


def test_a_reward_is_checked() -> None:
    wrong: Any = FinalAnswer
    with pytest.raises(ConfigurationError, match="Give a function or an object"):
        RowFilter(column="kind", equals="sum", reward=wrong)

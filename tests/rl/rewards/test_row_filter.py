from __future__ import annotations

from typing import Any

import pytest

from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Answer
from megalight.rl.rewards import FinalAnswer, RowFilter

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

from __future__ import annotations

from typing import Any

import pytest

from megalight.errors import DataError
from megalight.rl.countdown import Countdown
from megalight.rl.environment import Answer

ROW = {"target": 24, "nums": [3, 4, 6, 6]}


def value(text: str, row: dict[str, Any] | None = None, **options: Any) -> float:
    return Countdown(**options)(Answer(text, (), "end"), ROW if row is None else row)


@pytest.mark.parametrize(
    "equation",
    [
        "3 * 4 + 6 + 6",
        "(3*4)+(6+6)",
        " 3 * 4 + 6 + 6 = 24 ",
        "3 × 4 + 6 + 6",
        "3 \\times 4 + 6 + 6 = 24.0",
        "6 - -6 + 3 * 4",
        "(6 / 3\n) * 6 * 4 / 2",
    ],
)
def test_equations_that_reach_the_target(equation: str) -> None:
    row = {"target": 24, "nums": [2, 3, 4, 6, 6]} if "/ 2" in equation else ROW
    assert value(f"I think.\n<answer>{equation}</answer>", row) == 1.0


def test_division_is_exact() -> None:
    assert value("<answer>8 / (3 - 8 / 3)</answer>", {"target": 24, "nums": [3, 3, 8, 8]}) == 1.0


@pytest.mark.parametrize(
    "equation",
    [
        "3 * 4 + 6",  # not all numbers
        "3 * 4 + 6 + 6 + 0",
        "3 * 4 + 12",
        "3 + 4 + 6 + 6",  # another value
        "3 * 4 + 6 + 6 = 25",
        "3 * 4 + 6 + 6 = ",
        "24",
        "3 / (6 - 6) + 4",
        "3 // 4 + 6 * 6",
        "6 ** 6 ** 4 ** 3",
        "9**9**9",
        "3 * 4 + 6.0 + 6",
        "(3, 4, 6, 6)",
        "3(4) + 6 + 6",
        "__import__('os').system('true')",
        "exec('1')",
        "lambda: 24",
        "",
        "()",
        "3 *",
        "(" * 5000,
        "(" * 120 + "24" + ")" * 120,
        "-" * 250 + "24",
        "24" * 100_000,
    ],
)
def test_all_else_has_only_the_form(equation: str) -> None:
    assert value(f"<answer>{equation}</answer>") == 0.1
    assert value(f"<answer>{equation}</answer>", wrong=-1.0) == -1.0


@pytest.mark.parametrize("text", ["3 * 4 + 6 + 6", "<answer>3 * 4 + 6 + 6", "3 * 4 + 6 + 6</answer>", ""])
def test_without_tags_there_is_no_answer(text: str) -> None:
    assert value(text) == 0.0


def test_the_last_answer_counts() -> None:
    right, wrong = "<answer>3 * 4 + 6 + 6</answer>", "<answer>3</answer>"
    assert value(wrong + right) == 1.0
    assert value(right + wrong) == 0.1


def test_numbers_may_be_left_out_where_that_is_allowed() -> None:
    assert value("<answer>4 * 6</answer>", use_all=False) == 1.0
    assert value("<answer>6 * 6 - 6 - 6</answer>", use_all=False) == 0.1  # there are only two
    assert value("<answer>4 * 6</answer>", use_all=True) == 0.1


def test_columns_have_names_and_are_checked() -> None:
    assert value("<answer>1+2</answer>", {"goal": 3, "of": (1, 2)}, target="goal", numbers="of") == 1.0
    with pytest.raises(DataError, match="Name their columns"):
        value("<answer>1+2</answer>", {"goal": 3, "nums": [1, 2]})
    with pytest.raises(DataError, match="Name their columns"):
        value("<answer>1+2</answer>", {"target": 3, "nums": "1 2"})

from __future__ import annotations

from typing import Any

import pytest

from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Answer
from megalight.rl.rewards import FinalAnswer, boxed, hashes, tags


def value(text: str, truth: Any, **options: Any) -> float:
    return FinalAnswer(**options)(Answer(text, (), "end"), {"answer": truth})


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("Thus \\boxed{42}.", "42"),
        ("Thus \\boxed{42}.", 42),
        ("We have 6 * 7.\n#### 42", "They pay 6 * 7 = <<6*7=42>>42.\n#### 42"),
        ("#### 1,000", "#### 1000"),
        ("so it is $1,234.50", "1234.5"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{\\dfrac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{-3}", "Work ... \\boxed{-3}"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{50\\%}", "0.5"),
        ("\\boxed{50}", "50%"),
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\fbox{5}", "5"),
        ("{ \\boxed{5}", "5"),
        ("\\boxed{7} and \\boxed{8", "7"),
        ("<answer>a</answer> no, <answer> Paris </answer>", "paris"),
        ("\\boxed{\\text{Paris}}", "Paris"),
        ("\\boxed{(B)}", "B"),
        ("\\boxed{B.}", "(b)"),
        ("\\boxed{(1, 0.5)}", "(1,\\frac12)"),
        ("\\boxed{\\{1, 2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left(3,\\frac{\\pi}{2}\\right)"),
        ("\\boxed{(1, 2), (3, 0.5)}", "(3, \\frac12), (1,2)"),
        ("\\boxed{-2, 1}", "1,-2"),
        ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
        ("\\boxed{x^2 + 1}", "x^2+1"),
        ("\\boxed{0.333333}", "1/3"),
        ("\\boxed{2.0}", "2"),
        ("\\boxed{5}", ["four", 5]),
        ("the 3 of them make 12 apples", "12"),
    ],
)
def test_equal_answers(text: str, truth: Any) -> None:
    assert value(text, truth) == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("Thus \\boxed{43}.", "42"),
        ("first \\boxed{2}, then \\boxed{1}", "2"),
        ("\\boxed{1} but <answer>2</answer>", "2"),  # boxes come first
        ("\\boxed{1000001}", "1000000"),
        ("\\boxed{1}", "-1"),
        ("\\boxed{0.33}", "1/3"),
        ("\\boxed{5/0}", "5"),
        ("\\boxed{}", "0"),
        ("\\boxed{}", "x"),
        ("\\boxed{2x}", "2"),
        ("\\boxed{2 \\pi}", "2"),
        ("\\boxed{9**9**9}", "387420489"),
        ("\\boxed{1e999999999}", "10"),
        ("\\boxed{__import__('os')}", "0"),
        ("\\boxed{(1, 2)}", "[1, 2]"),
        ("\\boxed{(1, 2)}", "(1, 2, 3)"),
        ("\\boxed{(1, 2)}", "(2, 1)"),
        ("\\boxed{(1, 2)}", "1, 2"),
        ("\\boxed{1, 1, 2}", "1, 2, 2"),
        ("\\boxed{(2, 1), (3, 4)}", "(1, 2), (3, 4)"),
        ("\\boxed{12}", "1, 2"),
        ("\\boxed{New York}", "York"),
        ("\\boxed{42, 43, 44}", "42"),
        ("42 or 43", "42"),
    ],
)
def test_other_answers(text: str, truth: Any) -> None:
    assert value(text, truth, wrong=-1.0, missing=-2.0) == -1.0


def test_an_answer_without_a_mark_is_missing() -> None:
    assert value("no number", "1", missing=-0.5) == -0.5
    assert value("it is 1", "1", extractors=["boxed", "hashes"], missing=-0.5) == -0.5
    assert value("", "1", missing=-0.5) == -0.5


def test_only_text_after_the_thoughts_counts() -> None:
    options: dict[str, Any] = {"after": "</think>", "missing": -1.0}
    assert value("\\boxed{1}", "1", **options) == -1.0
    assert value("\\boxed{1}</think> It is 2.", "1", **options) == 0.0
    assert value("\\boxed{2}</think> \\boxed{1}", "1", **options) == 1.0


def test_a_tolerance_is_relative_and_whole_numbers_are_exact() -> None:
    assert value("\\boxed{99.5}", 100, tolerance=0.01) == 1.0
    assert value("\\boxed{98.5}", 100, tolerance=0.01) == 0.0
    assert value("\\boxed{99}", 100, tolerance=0.05) == 0.0
    assert value("\\boxed{0.333333}", "1/3", tolerance=0.0) == 0.0


@pytest.mark.parametrize("row", [{"solution": "5"}, {"answer": None}, {"answer": []}, {"answer": " "}, {"answer": {}}])
def test_a_row_without_a_right_answer_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'answer'"):
        FinalAnswer()(Answer("5", (), "end"), row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extractors": ["box"]}, "extractors has 'box'"),
        ({"extractors": []}, "extractors is empty"),
        ({"tolerance": -1.0}, "tolerance is -1"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"after": ""}, "after is empty"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FinalAnswer(**options)


@pytest.mark.parametrize("piece", ["\\boxed{", "}", "<answer>", "####", "\\boxed{(", "(,", "[1,", "\\text{"])
def test_long_answers_end(piece: str) -> None:
    # A blow-up would take hours.
    text = piece * (100_000 // len(piece))
    for answer in (text, f"\\boxed{{{text}", f"<answer>({text})</answer>"):
        assert value(answer, "(1, 2)", wrong=0.0, missing=0.0) == 0.0
    for find in (boxed, tags, hashes):
        assert find(f"{text} x") != "(1, 2)"

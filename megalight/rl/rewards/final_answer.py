"""The reward of answers that end in what a row says is right: a number or a short text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from megalight.errors import ConfigurationError, DataError, nearest
from megalight.rl.environment import Answer
from megalight.rl.rewards.answer_extraction import (
    Extractor,
    Number,
    check_extractors,
    extract_answer,
    plain,
    read_number,
)

EXTRACTORS: tuple[Extractor, ...] = ("boxed", "tags", "hashes", "last_number")
BRACKETS = {"(": ")", "[": "]", "{": "}"}
ENDS = frozenset(BRACKETS.values())
ORDERED = ("(", "[")
"""Brackets of lists whose order counts; in a set, and without brackets, it does not."""
LETTER = re.compile(r"\(?([a-zA-Z])[).]?")
"""A choice, such as ``(B)``."""


class FinalAnswer:
    r"""1 if the final answer is that of the row, else 0 (or ``wrong`` and ``missing``).

    Equal are numbers of equal value, however they are written (``1,000``, ``\frac{1}{2}``, ``0.5``, ``50\%``), texts
    that differ in case, spaces and the looks of LaTeX alone, and lists whose entries are equal: in ``(1, 2)`` their
    order counts, in ``{1, 2}`` and ``1, 2`` it does not. Nothing is computed: ``\sqrt{8}`` is not ``2\sqrt{2}``. For
    that, give a function of your own with a package such as ``math-verify``.

    Args:
        column: where rows hold the right answer: a number, a text, or a list of which any is right. A text that has a
            form itself (``... #### 42``, ``... \boxed{42}``) is read there, as solutions of GSM8K and MATH are.
        extractors: where the answer is looked for. The first of these that occurs decides, and its last place counts:
            ``boxed`` is ``\boxed{...}``, ``tags`` is ``<answer>...</answer>``, ``hashes`` is the line after ``####``,
            and ``last_number`` is the last number in the text.
        after: only text after the last place of this counts, such as ``</think>``. Without it, the answer is missing.
        tolerance: how far a number may be from the right one, relative to it. Two whole numbers must be equal.
        wrong: value of another answer.
        missing: value of an answer in which none of them finds one.

    Raises:
        ConfigurationError: an extractor is unknown, or a value is not finite or negative where it cannot be.
    """

    def __init__(
        self,
        *,
        column: str = "answer",
        extractors: Sequence[Extractor] = EXTRACTORS,
        after: str | None = None,
        tolerance: float = 1e-6,
        wrong: float = 0.0,
        missing: float = 0.0,
    ) -> None:
        check_extractors(extractors)
        if not 0 <= tolerance < math.inf:
            raise ConfigurationError(f"tolerance is {tolerance}; it must be finite and at least 0.")
        if after == "":
            raise ConfigurationError("after is empty; give a text such as '</think>', or leave it out.")
        self.column = column
        self.extractors = tuple(extractors)
        self.after = after
        self.tolerance = Fraction(repr(float(tolerance)))  # as it is written: 1e-6 is a millionth
        self.wrong = wrong
        self.missing = missing

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer.

        Raises:
            DataError: the row has no right answer.
        """
        truths = self.truths(row)
        text = answer.text
        if self.after is not None:
            _, found, text = text.rpartition(self.after)
            if not found:
                return self.missing
        given = extract_answer(text, self.extractors)
        if given is None:
            return self.missing
        return 1.0 if any(same(given, truth, self.tolerance) for truth in truths) else self.wrong

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row without a right answer, before work starts.

        Raises:
            DataError: it has none.
        """
        self.truths(row)

    def truths(self, row: Mapping[str, Any]) -> list[str]:
        """Return what a row says is right.

        Raises:
            DataError: it says nothing, or something that is neither a text nor a number.
        """
        if self.column not in row:
            raise DataError(
                f"the row has no {self.column!r}; it has {', '.join(map(repr, row))}. Name the column of right answers "
                f"with column.{nearest(self.column, row)}"
            )
        value = row[self.column]
        found = list(value) if isinstance(value, list | tuple) else [value]
        if not found or not all(isinstance(each, str | int | float) and str(each).strip() for each in found):
            raise DataError(
                f"{self.column!r} of the row is {value!r}; it must be a text, a number, or a list of some of them."
            )
        return [extract_answer(str(each), ("boxed", "hashes")) or str(each) for each in found]


def same(given: str, truth: str, tolerance: Fraction) -> bool:
    """Return whether an answer is the right one.

    Args:
        given: the answer.
        truth: the right one.
        tolerance: relative difference of numbers that are not both whole.
    """
    numbers = read_number(given), read_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return close(numbers[0], numbers[1], tolerance)
    texts = plain(given).strip(" .").casefold(), plain(truth).strip(" .").casefold()
    lists = entries(texts[0]), entries(texts[1])
    if lists[0] and lists[1]:
        return lists[0][0] == lists[1][0] and _same_entries(*lists[0], lists[1][1], tolerance)
    letters = LETTER.fullmatch(texts[0]), LETTER.fullmatch(texts[1])
    if letters[0] and letters[1]:
        return letters[0][1] == letters[1][1]
    bare = ["".join(text.split()) for text in texts]
    return bare[0] == bare[1] != ""


def close(given: Number, truth: Number, tolerance: Fraction) -> bool:
    """Return whether numbers are equal. A percent sign is a unit or a hundredth where only one of them has it."""
    if given.percent == truth.percent:
        return _near(given.value, truth.value, tolerance)
    part, other = (given, truth) if given.percent else (truth, given)
    return _near(part.value, other.value, tolerance) or _near(part.value / 100, other.value, tolerance)


def _near(one: Fraction, other: Fraction, tolerance: Fraction) -> bool:
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def _same_entries(bracket: str, given: list[str], truth: list[str], tolerance: Fraction) -> bool:
    if len(given) != len(truth):
        return False
    if bracket in ORDERED:
        return all(same(mine, theirs, tolerance) for mine, theirs in zip(given, truth, strict=True))
    left = list(truth)
    for mine in given:
        found = next((place for place, theirs in enumerate(left) if same(mine, theirs, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def entries(text: str) -> tuple[str, list[str]] | None:
    """Return the bracket and the entries of a list, such as ``(1, 2)`` or, without brackets, ``1, 2``.

    None if the text has no comma between entries, or ends brackets that it did not begin.
    """
    text = text.replace("\\{", "{").replace("\\}", "}")
    bracket = text[0] if len(text) > 1 and BRACKETS.get(text[0]) == text[-1] else ""
    found = _divided(text[1:-1] if bracket else text)
    if found is None and bracket:  # "(1, 2), (3, 4)" has no bracket around it
        bracket, found = "", _divided(text)
    return None if found is None or len(found) < 2 else (bracket, found)


def _divided(text: str) -> list[str] | None:
    """Divide a text at commas outside of brackets; None if a bracket ends that did not begin."""
    found, depth, start = list[str](), 0, 0
    for place, sign in enumerate(text):
        if sign in BRACKETS:
            depth += 1
        elif sign in ENDS:
            depth -= 1
            if depth < 0:
                return None
        elif sign == "," and not depth:
            found.append(text[start:place])
            start = place + 1
    return [*found, text[start:]]

"""Puzzles of the game Countdown, made by a seed: reach a target with given numbers."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from megalight.errors import ConfigurationError, DataError
from megalight.rl.environment import Answer
from megalight.rl.prompts import Row, RowSource
from megalight.rl.rewards import read_number, tags

LONGEST = 256
"""Characters of an equation, at most; a longer one is wrong."""
ALLOWED = re.compile(r"[\d\s()+\-*/]*")
SIGNS = {"×": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": ""}
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Countdown:
    """1 if the answer's equation reaches the target, ``wrong`` if another stands in its tags, and 0 without tags.

    The equation is what the last ``<answer>...</answer>`` holds: whole numbers, ``+ - * /`` and brackets, and at the
    end ``= target`` or not. It is evaluated as fractions. Each of the row's numbers must occur once, and no other.

    Args:
        target: where rows hold the target.
        numbers: where rows hold the list of numbers.
        wrong: value of an answer in tags that is not right: it has the form, at least.
        use_all: whether all numbers must be used. If not, some may be left out.
    """

    def __init__(
        self, *, target: str = "target", numbers: str = "nums", wrong: float = 0.1, use_all: bool = True
    ) -> None:
        self.target = target
        self.numbers = numbers
        self.wrong = wrong
        self.use_all = use_all

    def __call__(self, answer: Answer, row: Mapping[str, Any]) -> float:
        """Return the value of an answer.

        Raises:
            DataError: the row has no target, or no numbers.
        """
        self.check(row)
        equation = tags(answer.text)
        if equation is None:
            return 0.0
        return 1.0 if self._reaches(equation, row[self.target], Counter(row[self.numbers])) else self.wrong

    def check(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that is no puzzle, before work starts.

        Raises:
            DataError: it has no target, or no numbers.
        """
        target, numbers = row.get(self.target), row.get(self.numbers)
        if not isinstance(target, int) or not isinstance(numbers, list | tuple):
            raise DataError(
                f"the row has {self.target!r}: {target!r} and {self.numbers!r}: {numbers!r}; Countdown needs a whole "
                "number and a list of them. Name their columns with target and numbers."
            )

    def _reaches(self, equation: str, target: int, numbers: Counter[int]) -> bool:
        left, equals, right = equation.partition("=")
        if equals and ((said := read_number(right)) is None or said.value != target):
            return False
        tree = parsed(left)
        if tree is None:
            return False
        used: Counter[Any] = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        # Before anything is computed, so that no number is larger than those of the row.
        if used != numbers if self.use_all else used - numbers:
            return False
        try:
            return value_of(tree) == target
        except ZeroDivisionError:
            return False


def parsed(text: str) -> ast.expr | None:
    """Return the tree of whole numbers, brackets and ``+ - * /`` that a text is, or None if it is anything else."""
    for written, meant in SIGNS.items():
        text = text.replace(written, meant)
    text = text.strip()
    if len(text) > LONGEST or not ALLOWED.fullmatch(text):
        return None
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # brackets that are too deep raise the last ones
        return None
    return tree if all(map(_known, ast.walk(tree))) else None


def _known(node: ast.AST) -> bool:
    """Return whether a node is of arithmetic; ``**`` and ``//``, calls, decimals and tuples are not."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.USub | ast.UAdd) or type(node) in OPERATORS


def value_of(tree: ast.expr) -> Fraction:
    """Compute a tree from :func:`parsed`.

    Raises:
        ZeroDivisionError: it divides by zero.
    """
    if isinstance(tree, ast.BinOp):
        return OPERATORS[type(tree.op)](value_of(tree.left), value_of(tree.right))
    if isinstance(tree, ast.UnaryOp):
        value = value_of(tree.operand)
        return -value if isinstance(tree.op, ast.USub) else value
    assert isinstance(tree, ast.Constant)
    assert isinstance(tree.value, int)
    return Fraction(tree.value)


TEXT = (
    "Write an equation that equals {target}. Use each of the numbers {numbers} exactly once, and only +, -, *, / and "
    "brackets. Think first. Then give the equation between <answer> and </answer>, for example "
    "<answer>(1 + 2) / 3</answer>."
)
TRIES = 1000
"""Puzzles in a row that were there before, after which there are taken to be no others."""


class CountdownPuzzles(RowSource):
    """Rows with the keys ``prompt``, ``target`` and ``nums``, for the reward :class:`Countdown`.

    Each puzzle has a solution, and none occurs twice. The form is that of the data set Countdown-Tasks-3to4.

    Args:
        count: number of puzzles.
        seed: puzzles of another seed are others, though some may occur in both.
        sizes: how many numbers a puzzle has; one of these, drawn for each.
        largest: numbers are from 1 to this.
        largest_target: targets are from 1 to this.
        text: the prompt, with ``{numbers}`` and ``{target}``.

    Raises:
        ConfigurationError: a value is out of range, ``text`` lacks one of the two, or there are not so many puzzles
            (in :meth:`rows`).
    """

    def __init__(
        self,
        *,
        count: int,
        seed: int = 1234,
        sizes: Sequence[int] = (3, 4),
        largest: int = 99,
        largest_target: int = 100,
        text: str = TEXT,
    ) -> None:
        for name, value in (("count", count), ("largest", largest), ("largest_target", largest_target)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1.")
        if not sizes or not all(2 <= size <= 8 for size in sizes):
            raise ConfigurationError(f"sizes is {list(sizes)}; name at least one, each from 2 to 8.")
        if missing := [key for key in ("{numbers}", "{target}") if key not in text]:
            raise ConfigurationError(f"text is {text!r}, without {missing[0]}; a puzzle needs both.")
        self.count, self.seed, self.sizes = count, seed, tuple(sizes)
        self.largest, self.largest_target, self.text = largest, largest_target, text

    def rows(self) -> list[Row]:
        """Return the puzzles."""
        draw = random.Random(self.seed)
        found: dict[tuple[Any, ...], Row] = {}
        tries = 0
        while len(found) < self.count:
            numbers, target = self._puzzle(draw)
            key = (target, *sorted(numbers))
            tries = tries + 1 if key in found else 0
            if tries > TRIES:
                raise ConfigurationError(
                    f"count is {self.count}, and there are about {len(found)} different puzzles; lower it, or raise "
                    "largest, largest_target or sizes."
                )
            text = self.text.replace("{numbers}", ", ".join(map(str, numbers))).replace("{target}", str(target))
            found.setdefault(key, {"prompt": text, "target": target, "nums": numbers})
        return list(found.values())

    def _puzzle(self, draw: random.Random) -> tuple[list[int], int]:
        while True:
            numbers = [draw.randint(1, self.largest) for _ in range(draw.choice(self.sizes))]
            value = _combined(draw, numbers)
            if value is not None and value.denominator == 1 and 1 <= value <= self.largest_target:
                return numbers, int(value)


def _combined(draw: random.Random, numbers: Sequence[int]) -> Fraction | None:
    """Return what a random equation with all numbers gives; None if it divides by zero."""
    left = [Fraction(number) for number in numbers]
    while len(left) > 1:
        one, other = (left.pop(draw.randrange(len(left))) for _ in range(2))
        sign = draw.choice("+-*/")
        if sign == "/" and not other:
            return None
        left.append(
            one + other if sign == "+" else one - other if sign == "-" else one * other if sign == "*" else one / other
        )
    return left[0]

"""Puzzles of the game Countdown, made by a seed: reach a target with given numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megalight.errors import ConfigurationError
from megalight.rl.prompts import Row, RowSource

TEXT = (
    "Write an equation that equals {target}. Use each of the numbers {numbers} exactly once, and only +, -, *, / and "
    "brackets. Think first. Then give the equation between <answer> and </answer>, for example "
    "<answer>(1 + 2) / 3</answer>."
)
TRIES = 1000
"""Puzzles in a row that were there before, after which there are taken to be no others."""


class CountdownPuzzles(RowSource):
    """Rows with the keys ``prompt``, ``target`` and ``nums``, for the reward :class:`~megalight.rl.rewards.Countdown`.

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

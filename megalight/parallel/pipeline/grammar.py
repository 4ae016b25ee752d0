"""The layout string: which parts of a model each stage holds, in the notation of Megatron-LM.

``E`` is the embedding, ``t`` a layer, ``m`` a multi-token-prediction layer, ``L`` the head with the loss. ``|`` ends a
stage. ``t*3`` means ``ttt``, and ``(tt|)*3`` means ``tt|tt|tt|``. Commas and blanks are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from megalight.errors import LayoutError

SYMBOLS = {"E": "embedding", "t": "layer", "m": "multi-token-prediction layer", "L": "head and loss"}
MAX_LENGTH = 100_000
"""Limit of symbols after repeats are expanded, so that a typing error does not fill the memory."""


def parse(text: str) -> tuple[str, ...]:
    """Parse a layout to the symbols of each stage: ``"Et|(tt|)*2L"`` -> ``("Et", "tt", "tt", "L")``.

    Raises:
        LayoutError: a character is unknown, a repeat has no number, or a bracket has no partner. The message shows the
            position.
    """
    return tuple(_Reader(text).read().split("|"))


def compose(stages: Sequence[str]) -> str:
    """Write ``stages`` as a short layout string, which :func:`parse` reads."""
    runs = [(stage, len(list(run))) for stage, run in groupby(stages)]
    # No `|` follows the last stage, so it cannot be part of a repeat.
    last, count = runs.pop()
    runs += [(last, count - 1)] if count > 1 else []
    return "".join([*(_repeat(_short(stage) + "|", times) for stage, times in runs), _short(last)])


def _repeat(text: str, times: int) -> str:
    return text * times if times == 1 or len(text) * times <= len(text) + 4 else f"({text})*{times}"


def _short(stage: str) -> str:
    """Shorten repeated symbols: ``ttttt`` becomes ``t*5``."""
    runs = [(symbol, len(list(run))) for symbol, run in groupby(stage)]
    return "".join(symbol * times if times < 5 else f"{symbol}*{times}" for symbol, times in runs)


class _Reader:
    """A recursive-descent parser. Errors show the position in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = [(match[0], match.start()) for match in re.finditer(r"\d+|[^\s,]", text)]
        self.next = 0

    def read(self) -> str:
        found = self._sequence()
        if self.next < len(self.tokens):
            raise self._error("this ')' has no '('; remove it, or add '(' before it.")
        return found

    def _sequence(self) -> str:
        parts: list[str] = []
        length = 0
        for unit in self._units():
            parts.append(unit * self._times(unit))
            length += len(parts[-1])
            if length > MAX_LENGTH:
                raise self._error(f"repeats expand to more than {MAX_LENGTH} symbols; lower a repeat.")
        return "".join(parts)

    def _units(self) -> Iterator[str]:
        """Yield symbols, separators and expanded brackets, up to the end or to the closing bracket of this sequence."""
        while (token := self._peek()) not in ("", ")"):
            start = self.next
            self.next += 1
            if token == "(":
                unit = self._sequence()
                if self._peek() != ")":
                    self.next = start
                    raise self._error("this '(' is not closed; add ')*n' at the end of the part that repeats.")
                self.next += 1
                yield unit
            elif token in SYMBOLS or token == "|":
                yield token
            else:
                self.next = start
                known = ", ".join(f"{symbol} ({name})" for symbol, name in SYMBOLS.items())
                raise self._error(f"{token!r} is unknown here; use {known}, '|' between stages, and '(...)*n'.")

    def _times(self, unit: str) -> int:
        if self._peek() != "*":
            return 1
        self.next += 1
        # Nine digits are more than the limit allows. Longer numbers are cut, because `int` is
        # slow for very long ones.
        if not self._peek().isdecimal() or not (times := int(self._peek()[:9])):
            raise self._error("'*' needs a number of at least 1 after it, as in 't*3' or '(tt|)*3'.")
        # Before the text is built: it would take the memory that the limit is there to save.
        if times * len(unit) > MAX_LENGTH:
            raise self._error(f"this repeat expands to more than {MAX_LENGTH} symbols; lower it.")
        self.next += 1
        return times

    def _peek(self) -> str:
        return self.tokens[self.next][0] if self.next < len(self.tokens) else ""

    def _error(self, rule: str) -> LayoutError:
        place = self.tokens[self.next][1] if self.next < len(self.tokens) else len(self.text)
        return LayoutError(f"layout {self.text!r}, character {place + 1}: {rule}\n  {self.text}\n  {' ' * place}^")

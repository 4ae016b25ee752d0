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


WHOLE = 4
"""Runs of equal ranks up to this length are shown completely; of longer runs, only the first and last rank."""


def draw(stages: Sequence[str], pp: int) -> str:
    """Return the symbols of each stage as a table, with global indices of layers.

    ::

                chunk 0    chunk 1
        rank 0  E 0-1      6-7
        rank 1  2-3        8-9
        rank 2  4-5        10-11 L
    """
    names = _names(stages)
    chunks = -(-len(stages) // pp)
    lines = [["", *(f"chunk {chunk}" for chunk in range(chunks))]] if chunks > 1 else []
    for _, run in groupby(range(min(pp, len(stages))), key=lambda rank: tuple(stages[rank::pp])):
        ranks = list(run)
        shown = [*ranks] if len(ranks) <= WHOLE else [ranks[0], None, ranks[-1]]
        lines += [["...", *["..."] * chunks] if r is None else [f"rank {r}", *names[r::pp]] for r in shown]
    widths = [max(len(line[place]) for line in lines if place < len(line)) for place in range(len(lines[-1]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines
    )


def _names(stages: Sequence[str]) -> list[str]:
    names, layer = [], 0
    for held in stages:
        words = []
        for symbol, run in groupby(held):
            count = len(list(run))
            if symbol == "t":
                words.append(f"{layer}-{layer + count - 1}" if count > 1 else str(layer))
                layer += count
            else:
                words.append(symbol if count == 1 else f"{symbol}*{count}")
        names.append(" ".join(words) or "(nothing)")
    return names


def wrong_symbols(stages: Sequence[str], num_layers: int, num_mtp: int) -> str:
    """Return why the symbols of ``stages`` do not describe a model of ``num_layers`` layers; empty if they do."""
    whole = "".join(stages)
    for symbol, name, place in (("E", "embedding", 0), ("L", "loss", -1)):
        end = "last" if place else "first"
        if whole.count(symbol) != 1:
            # One reason only, the first in reading order: the next ones are often consequences of it.
            return f"{symbol!r} ({name}) occurs {whole.count(symbol)} times. Write it once, in the {end} stage."
        if not stages[place] or stages[place][place] != symbol:
            return f"{symbol!r} ({name}) must be the {end} symbol of the {end} stage. Move it there."
    if whole.count("m") != num_mtp:
        has = f"{num_mtp}. Write {num_mtp}." if num_mtp else "none. Remove them."
        return f"it names {whole.count('m')} multi-token-prediction layers 'm', but the model has {has}"
    if num_mtp and not any("m" * num_mtp in stage for stage in stages):
        return "multi-token-prediction layers 'm' are on different stages. Put them on one stage."
    if "t" in whole[whole.find("m") :] and num_mtp:
        return "layers 't' follow multi-token-prediction layers 'm'. Put the layers first."
    if (found := whole.count("t")) != num_layers:
        much = f"{abs(found - num_layers)} too {'many' if found > num_layers else 'few'}"
        return f"it names {found} layers 't', but the model has {num_layers}: {much}."
    return ""


def suggest_even(num_layers: int, pp: int, vpp: int, counted: int, num_mtp: int = 0) -> str:
    """Return advice for ``num_layers`` layers that do not fill the stages evenly.

    Args:
        num_layers: layers of the model.
        pp, vpp: pipeline ranks, and chunks on each.
        counted: layers, with embedding and loss if they count as layers.
        num_mtp: multi-token-prediction layers, which come on top.
    """
    stages = pp * vpp
    # Embedding and loss stay counted as they were, so that the advice changes one number only.
    low = counted // stages * stages - (counted - num_layers)
    near = [str(count) for count in (low, low + stages) if count >= stages and count != num_layers]
    ways = [f"take {' or '.join(near)} layers", *_counting(num_layers, stages)]
    return _advice(num_layers, pp, vpp, [*ways, *_ends(num_layers, pp, vpp)], num_mtp)


def suggest_uneven(num_layers: int, pp: int, vpp: int, first: int | None, last: int | None, num_mtp: int = 0) -> str:
    """Return advice for a first and a last rank whose layers leave a rest that the others cannot share."""
    ways = [] if num_layers % (pp * vpp) else ["remove first and last, for an even split"]
    return _advice(num_layers, pp, vpp, [*ways, *_ends(num_layers, pp, vpp, first, last)], num_mtp)


def _advice(num_layers: int, pp: int, vpp: int, ways: list[str], num_mtp: int) -> str:
    """Join ``ways`` and a layout that works, with its picture."""
    # Even with embedding and loss on stages of their own, some stages would be empty.
    if num_layers + 2 < pp * vpp:
        return f"{num_layers} layers, embedding and loss fill {num_layers + 2} stages at most; lower pp or vpp."
    layout = balanced(num_layers, pp * vpp, num_mtp)
    text = ", or ".join([*ways, f"give this layout: {compose(layout)!r}"])
    return f"{text[0].upper()}{text[1:]}\n{draw(layout, pp)}"


def balanced(num_layers: int, stages: int, num_mtp: int = 0) -> tuple[str, ...]:
    """Return stages that are as equal as possible if embedding and loss count as one layer each.

    Stages with one layer less are at the ends: the embedding and the loss take time too.

    Args:
        num_layers: layers of the model.
        stages: at least 2, and at most ``num_layers + 2``.
        num_mtp: multi-token-prediction layers, which come on top.
    """
    share, more = divmod(num_layers + 2, stages)
    start = (stages - more + 1) // 2
    counts = [share + (start <= index < start + more) for index in range(stages)]
    held = ["t" * (count - (index in (0, stages - 1))) for index, count in enumerate(counts)]
    return ("E" + held[0], *held[1:-1], held[-1] + "m" * num_mtp + "L")


def _counting(num_layers: int, stages: int) -> Iterator[str]:
    """Yield advice to count the embedding or the loss as a layer, if this divides."""
    if (num_layers + 1) % stages == 0 and num_layers >= 2 * stages - 1:
        yield "count the embedding or the loss as a layer"
    if (num_layers + 2) % stages == 0 and num_layers >= 2 * stages - 2:
        yield "count the embedding and the loss as layers"


def _ends(num_layers: int, pp: int, vpp: int, first: int | None = None, last: int | None = None) -> Iterator[str]:
    """Yield numbers of layers for the first and last rank that divide, close to the given ones or to equal shares."""
    # With two ranks there is no other rank that takes a rest.
    if pp < 3 or num_layers < pp * vpp:
        return
    near = [num_layers / pp if count is None else count for count in (first, last)]
    # Eight on each side: enough to find the nearest fit, and few pairs to try.
    counts = [sorted(range(vpp, num_layers, vpp), key=lambda count: abs(count - at))[:8] for at in near]
    fits = [
        (a, b)
        for a in counts[0]
        for b in counts[1]
        if (rest := num_layers - a - b) > 0 and rest % ((pp - 2) * vpp) == 0
    ]
    if fits:
        # Of equal distances the one with fewer layers on the first rank, which holds the embedding too.
        a, b = min(fits, key=lambda pair: (abs(pair[0] - near[0]) + abs(pair[1] - near[1]), pair[0] > pair[1]))
        yield f"let the first rank hold {a} layers and the last {b}"

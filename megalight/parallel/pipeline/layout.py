"""The pipeline layout: which stage holds which part of the model.

Stages are counted in model order. With ``pp`` ranks and ``vpp`` chunks on each there are ``pp * vpp`` stages. Stage
``i`` is chunk ``i // pp`` of pipeline rank ``i % pp``, so a micro-batch visits every rank ``vpp`` times. The layout
string says the same in the notation of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megalight.errors import LayoutError


@dataclass(frozen=True)
class Stage:
    """The part of the model that one chunk of one pipeline rank holds.

    Attributes:
        index: number of the stage in model order.
        rank: pipeline rank.
        chunk: number of the chunk on its rank.
        embed: whether it holds the embedding (only the first stage).
        layers: global indices of its layers, consecutive.
        head: whether it holds the head and computes the loss (only the last stage).
        mtp: number of multi-token-prediction layers: all of the model or none.
    """

    index: int
    rank: int
    chunk: int
    embed: bool
    layers: tuple[int, ...]
    head: bool
    mtp: int = 0

    def __str__(self) -> str:
        held = ["embed"] * self.embed + ["mtp"] * bool(self.mtp) + ["head"] * self.head
        if self.layers:
            held.insert(self.embed, f"layers {self.layers[0]} to {self.layers[-1]}")
        return f"stage {self.index} ({', '.join(held) or 'no layers'})"


@dataclass(frozen=True)
class PipelineLayout:
    """All stages of a model. Create one with :meth:`even`, :meth:`uneven` or :meth:`of_string`, which check it.

    Attributes:
        stages: the stages in model order.
        pp: number of pipeline ranks.
        vpp: number of chunks on each rank.
    """

    stages: tuple[Stage, ...]
    pp: int
    vpp: int

    @classmethod
    def even(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        *,
        count_embedding: bool = False,
        count_loss: bool = False,
        num_mtp: int = 0,
    ) -> PipelineLayout:
        """Create a layout with the same number of layers on every stage.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank.
            count_embedding: whether the embedding counts as a layer. The first stage then holds one layer less.
            count_loss: the same for the head with the loss and the last stage.
            num_mtp: multi-token-prediction layers of the model. They are on the last stage, and do not count.

        Raises:
            LayoutError: the layers do not divide, or a stage would have no layer. The message suggests layouts.
        """
        _check_degrees(num_layers, pp, vpp)
        counted = num_layers + count_embedding + count_loss
        share, left = divmod(counted, pp * vpp)
        counts = [share] * (pp * vpp)
        # The ends hold a layer less for each part that counts as one.
        counts[0] -= count_embedding
        counts[-1] -= count_loss
        if left or min(counts) < 1:
            parts = [f"{num_layers} layers", *["the embedding"] * count_embedding, *["the loss"] * count_loss]
            what = " + ".join(parts) + (f" = {counted}" if counted > num_layers else "")
            rule = "do not divide evenly over" if left else "leave a stage without a layer, of"
            advice = suggest_even(num_layers, pp, vpp, counted, num_mtp)
            raise LayoutError(f"{what} {rule} {_stages(pp, vpp)}. {advice}")
        return cls._of_symbols(_symbols(counts, num_mtp), pp)

    @classmethod
    def uneven(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        *,
        first: int | None = None,
        last: int | None = None,
        num_mtp: int = 0,
    ) -> PipelineLayout:
        """Create a layout with given numbers of layers on the first and last rank; the others share the rest equally.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank. The layers of a rank are divided equally among its chunks.
            first, last: layers on the first and on the last rank, over all chunks. None: as on the others.
            num_mtp: multi-token-prediction layers of the model. They are on the last stage, and do not count.

        Raises:
            LayoutError: the rest does not divide, or the layers of a rank do not divide by its chunks.
        """
        _check_degrees(num_layers, pp, vpp)
        # With one rank, the first is the last; the next check refuses that.
        given = {rank: count for rank, count in ((0, first), (pp - 1, last)) if count is not None}
        if pp < 2 and given:
            raise LayoutError(f"pp={pp}; it must be at least 2 to set the layers of the first or last rank.")
        for rank, count in given.items():
            if count < vpp or count % vpp:
                raise LayoutError(
                    f"{count} layers on the {'last' if rank else 'first'} pipeline rank cannot be divided equally "
                    f"among its {vpp} chunk{'s' * (vpp > 1)}; give a positive multiple of {vpp}."
                )
        # With every rank given, the sum has to be right.
        others, rest = pp - len(given), num_layers - sum(given.values())
        share, left = divmod(rest, others * vpp) if others else (0, rest)
        if left or (others and share < 1):
            rule = f"a multiple of {others * vpp} above 0" if others else "0"
            raise LayoutError(
                f"{num_layers} layers with {first=} and {last=} leave {rest} for the {others} other pipeline ranks "
                f"with {vpp} chunk{'s' * (vpp > 1)} each; this number must be {rule}. "
                + suggest_uneven(num_layers, pp, vpp, first, last, num_mtp)
            )
        # In model order: chunk 0 of every rank, then chunk 1 of every rank.
        counts = [given.get(rank, share * vpp) // vpp for _ in range(vpp) for rank in range(pp)]
        return cls._of_symbols(_symbols(counts, num_mtp), pp)

    @classmethod
    def of_string(cls, text: str, num_layers: int, pp: int, vpp: int = 1, *, num_mtp: int = 0) -> PipelineLayout:
        """Create a layout from a string such as ``"Et|tt|tt|tL"`` (:mod:`~megalight.parallel.pipeline.layout`).

        A stage may hold no layer: only the embedding, only the head, or nothing (``||``).

        Args:
            text: the layout string.
            num_layers: layers of the model. The layout must have the same number.
            pp: pipeline ranks. The number of stages must be a multiple of it.
            vpp: chunks on each rank, to check the layout. 1: not checked.
            num_mtp: multi-token-prediction layers of the model.

        Raises:
            LayoutError: the string cannot be parsed, or does not fit the model or the ranks. The message shows how it
                was read.
        """
        # With one rank, `vpp` only checks the string, and the message below is the better one.
        _check_degrees(num_layers, pp, vpp if pp > 1 else 1)
        stages = parse(text)
        chunks, left = divmod(len(stages), pp)
        wrong = wrong_symbols(stages, num_layers, num_mtp)
        if left:
            low = len(stages) - left
            near = f"{low} or {low + pp}" if low else f"{pp}"
            wrong = f"it has {len(stages)} stages, which is no multiple of pp={pp}. Write {near}, or change pp."
        elif vpp not in (1, chunks):
            wrong = f"its {len(stages)} stages with pp={pp} are {chunks} chunks per rank, not vpp={vpp}. Remove vpp."
        elif pp == 1 and chunks > 1:
            wrong = f"it has {len(stages)} stages, but pp is 1. Increase pp, or write one stage without '|'."
        if wrong:
            raise LayoutError(f"layout {text!r}: {wrong} As read:\n{draw(stages, 1 if left else pp)}")
        return cls._of_symbols(stages, pp)

    @classmethod
    def _of_symbols(cls, symbols: Sequence[str], pp: int) -> PipelineLayout:
        stages: list[Stage] = []
        layer = 0
        for index, held in enumerate(symbols):
            # Arguments are evaluated from left to right, so `layer` ends as the first one of the next stage.
            layers = tuple(range(layer, layer := layer + held.count("t")))
            stages.append(Stage(index, index % pp, index // pp, "E" in held, layers, "L" in held, held.count("m")))
        return cls(tuple(stages), pp, len(symbols) // pp)

    @property
    def num_layers(self) -> int:
        """Number of layers of all stages."""
        return sum(len(stage.layers) for stage in self.stages)

    def of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the chunks of one pipeline rank, in model order."""
        # Stage `i` is on rank `i % pp`.
        return self.stages[pp_rank :: self.pp]

    def weights(self, head: float) -> tuple[float, ...]:
        """Return the work of each stage in layers. The head with the loss counts ``head`` layers, the embedding 0."""
        return tuple(len(stage.layers) + stage.mtp + head * stage.head for stage in self.stages)

    def draw(self) -> str:
        """Return a table: a line per pipeline rank, a column per chunk. Long runs of equal ranks are shortened."""
        return draw(self._held(), self.pp)

    def __str__(self) -> str:
        """Return the layout string."""
        return compose(self._held())

    def _held(self) -> tuple[str, ...]:
        return tuple("E" * s.embed + "t" * len(s.layers) + "m" * s.mtp + "L" * s.head for s in self.stages)


def _symbols(counts: Sequence[int], num_mtp: int) -> list[str]:
    held = ["t" * count for count in counts]
    held[0] = "E" + held[0]
    # They share the head and its loss, so they stand before it on the last stage.
    held[-1] += "m" * num_mtp + "L"
    return held


def _stages(pp: int, vpp: int) -> str:
    return f"{pp * vpp} stages (pp={pp}, vpp={vpp})" if vpp > 1 else f"{pp} stages"


def _check_degrees(num_layers: int, pp: int, vpp: int) -> None:
    for name, value in (("num_layers", num_layers), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise LayoutError(f"{name}={value}; it must be at least 1.")
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} chunks per rank with pp=1; there is no pipeline to interleave. Set vpp to 1.")


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

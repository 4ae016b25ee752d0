"""A layout as a text table: a line per pipeline rank, a column per chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

WHOLE = 4
"""Runs of equal ranks up to this length are shown completely; of longer runs, only the first and last rank."""


def picture(stages: Sequence[str], pp: int) -> str:
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

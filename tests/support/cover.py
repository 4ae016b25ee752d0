"""Pairwise covers: a few rows of a product, and the rows of tables that run by default, have every pair there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

Pair = frozenset[str]


def pairwise(rows: Iterable[tuple[Any, ...]], first: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Return ``first``, and of ``rows`` the few that add every further pair of values: each time who adds the most."""
    chosen = list(first)
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in [*chosen, *rows]}
    left = set().union(*pairs.values()).difference(*(pairs[row] for row in chosen))
    while left:
        chosen.append(max(pairs, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return chosen


@dataclass(frozen=True)
class Row:
    """One row of a parametrized test.

    Attributes:
        name: the test and the row's values.
        ranks: how many processes it takes.
        default: it is not marked ``full``.
        features: what may go wrong together with something else.
        alone: what is to occur, but not beside every feature.
    """

    name: str
    ranks: int
    default: bool
    features: frozenset[str]
    alone: frozenset[str] = frozenset()

    @property
    def pairs(self) -> set[Pair]:
        """Pairs of features, and each by itself."""
        return {frozenset([each]) for each in self.features | self.alone} | {
            frozenset(pair) for pair in itertools.combinations(self.features, 2)
        }


def rows_of(test: Any, describe: Callable[..., tuple[int, set[str], set[str]]]) -> list[Row]:
    """Return the rows of a test with one mark ``parametrize``, as pytest reads them.

    Args:
        test: The test.
        describe: Called with the values of a row; returns ranks, features, and what counts alone.
    """
    marks: list[pytest.Mark] = test.pytestmark
    ((_, values),) = (mark.args for mark in marks if mark.name == "parametrize")
    rows = []
    for each in values:
        parameters = each if isinstance(each, type(pytest.param())) else pytest.param(each)
        ranks, features, alone = describe(*parameters.values)
        full = any(mark.name == "full" for mark in (*marks, *parameters.marks))
        name = f"{test.__module__}.{test.__name__}: {parameters.values}"
        rows.append(Row(name, ranks, not full, frozenset(features), frozenset(alone)))
    return rows


def pairs_of(rows: Iterable[Row]) -> set[Pair]:
    """Return what some rows have together."""
    return {pair for row in rows for pair in row.pairs}


def missing(rows: list[Row], others: list[Row], ranks: int) -> dict[str, str]:
    """Return what only rows marked ``full`` have.

    Args:
        rows: The rows of the tables.
        others: Rows of further tables, of which the default ones count too.
        ranks: The most that a default row may take. What no row of so few ranks has is left to the full tables.

    Returns:
        Features -> a row to run by default instead.
    """
    narrow = [row for row in rows if row.ranks <= ranks]
    have = pairs_of(row for row in rows + others if row.default)
    lacking = pairs_of(narrow) - have
    found = {}
    for pair in sorted(lacking, key=sorted):
        row = max((row for row in narrow if pair in row.pairs), key=lambda row: (len(row.pairs & lacking), -row.ranks))
        found[" beside ".join(sorted(pair))] = row.name
    return found


def idle(rows: list[Row], others: list[Row]) -> list[str]:
    """Return the default rows of the tables that have nothing of their own: without each, the rest has as much."""
    default = [row for row in rows + others if row.default]
    return [
        row.name for row in rows if row.default and row.pairs <= pairs_of(each for each in default if each is not row)
    ]

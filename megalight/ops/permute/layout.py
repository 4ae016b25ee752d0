"""Where rows of tokens stand when they are grouped by expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Permutation:
    """The row of each pair of a token and one of its experts, in an order grouped by expert.

    All tensors are on the device, so that the host need not know how many tokens an expert has. Groups follow each
    other in the order of the experts, and within a group rows are in the order of the tokens.

    Attributes:
        positions: ``[T, k]`` int32, the row of each pair; -1: the pair has no row.
        sizes: ``[E]`` int32, the number of tokens of each expert.
        offsets: ``[E]`` int32, the end of each group. A group is padded with rows of zeros up to its end.
        rows: ``R``, the number of rows of grouped tensors. Rows after the last group are zeros too.
    """

    positions: Tensor
    sizes: Tensor
    offsets: Tensor
    rows: int


def most_rows(pairs: int, num_experts: int, alignment: int) -> int:
    """Return how many rows ``pairs`` can need at most if the size of every group is a multiple of ``alignment``."""
    # At most min(pairs, E) groups are not empty, and each is padded by at most alignment - 1 rows.
    return (pairs + min(pairs, num_experts) * (alignment - 1)) // alignment * alignment

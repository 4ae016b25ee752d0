"""Where the tokens of each group stand among the columns of a transposed cast."""

from __future__ import annotations

from megalight.ops.permute import most_rows

GROUP = 128
"""Groups begin at multiples of so many columns: a weight gradient takes as many at once, so none has two groups."""


def most_columns(rows: int, num_experts: int) -> int:
    """Return how many columns ``rows`` in so many groups can need at most. It is a multiple of :data:`GROUP`."""
    return most_rows(rows, num_experts, GROUP)

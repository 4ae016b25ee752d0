"""Splitting a data set into train, validation and test by document."""

from __future__ import annotations

from megalight.errors import DataError

SPLITS = ("train", "validation", "test")


def split_bounds(split: str, num_documents: int) -> tuple[range, range, range]:
    """The documents of the three splits: contiguous, in order, covering all.

    Bounds are Megatron's: weights are normalised, accumulated as floats, and ``round(bound * num_documents)`` is where
    a split ends.

    Args:
        split: up to three weights, such as ``"969,30,1"``; missing ones are 0.
        num_documents: documents to divide.

    Raises:
        DataError: not numbers, a negative one, more than three, or all zero.
    """
    try:
        weights = [float(part) for part in str(split).replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise DataError(
            f"split {split!r}: it must be one to three weights >= 0 for train, validation, test, such as '969,30,1'."
        )
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    bound, edges = 0.0, [0]
    for weight in weights:
        bound += weight / total
        edges.append(round(bound * num_documents))
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])

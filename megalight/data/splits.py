"""Dividing the documents of a data set into train, validation and test."""

from __future__ import annotations

from megalight.errors import DataError

SPLITS = ("train", "validation", "test")

SPLIT = "969,30,1"
"""The weights of the splits where nobody names any; they are Megatron-LM's."""


def split_bounds(split: str, num_documents: int) -> tuple[range, range, range]:
    """Return the documents of the three splits: contiguous ranges, in order, that cover all documents.

    The bounds equal Megatron-LM's: weights are normalized and accumulated as floats, and a split ends at
    ``round(bound * num_documents)``.

    Args:
        split: three weights, such as ``"969,30,1"``; or one number, which means training alone.
        num_documents: number of documents.

    Raises:
        DataError: a weight is no number or is negative, all are zero, or there are two, or more than three.
    """
    try:
        weights = [float(part) for part in str(split).replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if len(weights) not in (1, 3) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise DataError(
            f"split is {split!r}; give three weights >= 0 for train, validation and test, such as '90,10,0', or '1' to "
            "train on all."
        )
    weights = [*weights, 0.0, 0.0][:3]
    # In floats and in this order, because another rounding would move a document to another split.
    total = sum(weights)
    bound, edges = 0.0, [0]
    for weight in weights:
        bound += weight / total
        edges.append(round(bound * num_documents))
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])

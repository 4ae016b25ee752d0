"""Packing items of different sizes into bins of one size: best fit, largest items first."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.errors import DataError


def best_fit(sizes: NDArray[Any], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each item into the fullest bin that has room for it (best-fit decreasing).

    It needs at most 11/9 of the fewest possible bins, plus one (Johnson et al., 1974). Items of equal size keep their
    order.

    Args:
        sizes: ``[n]``, each from 1 to ``capacity``.
        capacity: size of a bin.

    Returns:
        ``(items, bounds)``: the items ``[n]``, bin by bin, and ``[bins + 1]``: where each bin starts in them.

    Raises:
        DataError: an item is larger than a bin, or smaller than 1.
    """
    if len(sizes) and not 1 <= int(sizes.min()) <= int(sizes.max()) <= capacity:
        raise DataError(
            f"items have sizes from {int(sizes.min())} to {int(sizes.max())}; bins of {capacity} hold items of 1 to "
            f"{capacity}."
        )
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    chosen = np.empty(len(sizes), np.int64)
    room: list[int] = []  # the different amounts of room that bins have left, ascending: at most `capacity` of them
    bins: dict[int, list[int]] = {}  # room -> the bins that have it
    count = 0
    for place, size in enumerate(sizes[order].tolist()):
        # The smallest room that is large enough: the fullest bin.
        at = bisect_left(room, size)
        if at == len(room):
            number, left = count, capacity - size
            count += 1
        else:
            fullest = room[at]
            number, left = bins[fullest].pop(), fullest - size
            if not bins[fullest]:
                del room[at], bins[fullest]
        chosen[place] = number
        if left:
            if left not in bins:
                insort(room, left)
                bins[left] = []
            bins[left].append(number)
    # Stable, so that items of a bin keep the order of their sizes.
    by_bin = np.argsort(chosen, kind="stable")
    bounds = np.searchsorted(chosen[by_bin], np.arange(count + 1))
    return order[by_bin], bounds.astype(np.int64)

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.data.chat.dataset import best_fit
from megalight.errors import DataError


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_item_is_in_one_bin_and_bins_hold(sizes: list[int]) -> None:
    items, bounds = best_fit(np.asarray(sizes, np.int64), 12)
    assert sorted(items.tolist()) == list(range(len(sizes)))
    loads = [sum(sizes[k] for k in items[a:b]) for a, b in itertools.pairwise(bounds)]
    assert all(1 <= load <= 12 for load in loads)
    # no bin's largest item fits into an earlier bin: the bound of the algorithm rests on this
    assert len(loads) <= 11 / 9 * -(-2 * sum(sizes) // 12) + 1
    assert sum(load <= 6 for load in loads) <= 1


def test_the_fullest_bin_that_has_room() -> None:
    items, bounds = best_fit(np.asarray([2, 7, 5, 3, 2, 6]), 10)
    bins = [items[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert bins == [[1, 3], [5, 0, 4], [2]]  # 7+3, 6+2+2, 5


def test_sizes_that_fit_no_bin() -> None:
    for sizes in ([3, 11], [0, 4]):
        with pytest.raises(DataError, match="bins of 10 hold items of 1 to 10"):
            best_fit(np.asarray(sizes), 10)
    assert best_fit(np.zeros(0, np.int64), 4)[1].tolist() == [0]

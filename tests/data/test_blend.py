from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.data.blend import (
    BlendedDataset,
    blend_index,
    cached_blend_index,
    longest_blend,
    occurrences,
    requested_sizes,
    whole_weights,
)
from megalight.errors import DataError


class Numbers:
    """Samples ``(name, index)``."""

    def __init__(self, name: str, size: int) -> None:
        self.order, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | None) -> tuple[str, int | None]:
        if index is not None and not 0 <= index < self.size:
            raise IndexError(index)
        return self.order, index


def greedy(weights: list[int], steps: int, limits: list[int] | None = None) -> list[int]:
    """The rule, step by step, in exact arithmetic."""
    total, taken, chosen = sum(weights), [0] * len(weights), []
    for step in range(steps):
        behind = [
            Fraction(weight * max(step, 1), total) - count
            if limits is None or count < limits[d]
            else Fraction(-(10**9))
            for d, (weight, count) in enumerate(zip(weights, taken, strict=True))
        ]
        best = behind.index(max(behind))
        taken[best] += 1
        chosen.append(best)
    return chosen


def test_golden() -> None:
    assert whole_weights([0.5, 0.3, 0.2]) == [5, 3, 2]
    assert blend_index([5, 3, 2], 10).tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert blend_index([3, 1, 2], 6, [3, 1, 2]).tolist() == [0, 2, 1, 0, 2, 0]


@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=5), steps=st.integers(0, 150))
def test_index_is_the_greedy_rule(weights: list[int], steps: int) -> None:
    index = blend_index(weights, steps)
    assert index.dtype == np.int16
    assert index.tolist() == greedy(weights, steps)


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_everything_once(sizes: list[int]) -> None:
    index = blend_index(sizes, sum(sizes), sizes)
    assert index.tolist() == greedy(sizes, sum(sizes), sizes)
    assert np.bincount(index, minlength=len(sizes)).tolist() == sizes


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), steps=st.integers(1, 200))
def test_a_blend_never_lacks_samples(weights: list[int], steps: int) -> None:
    index = blend_index(weights, steps)
    sizes = requested_sizes(weights, index)
    total = sum(weights)
    for size, weight in zip(sizes, weights, strict=True):
        share = -(-steps * weight // total)
        assert size >= share + share * 5 // 1000
    blend = BlendedDataset([Numbers(str(d), size) for d, size in enumerate(sizes)], index)
    items = [blend[step] for step in range(len(blend))]
    for d in range(len(weights)):
        mine = [place for name, place in items if name == str(d)]
        assert mine == list(range(len(mine)))  # each in order, none twice


def test_requested_sizes_round_up_in_whole_numbers() -> None:
    # ceil(ceil(1000 x 0.5) x 1.005) = 503, ceil(300 x 1.005) = 302, ceil(200 x 1.005) = 201
    assert requested_sizes([5, 3, 2], blend_index([5, 3, 2], 1000)) == [503, 302, 201]


def test_longest_blend_of_a_data_set_that_comes_late() -> None:
    assert np.bincount(longest_blend([1, 1, 2, 7], [2, 1, 3, 10])).tolist() == [2, 1, 3, 10]


@given(data=st.data(), n=st.integers(1, 4))
def test_longest_blend_stops_before_a_repetition(data: st.DataObject, n: int) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    index = longest_blend(weights, sizes)
    taken = np.bincount(index, minlength=n)
    assert (taken <= sizes).all()
    following = greedy(weights, len(index) + 1)
    assert following[:-1] == index.tolist()
    assert taken[following[-1]] == sizes[following[-1]]  # one more step would repeat


def test_places() -> None:
    assert occurrences(np.array([1, 0, 1, 1, 0], np.int16), 3).tolist() == [0, 0, 1, 2, 1]


def test_too_few_samples_raise_at_once() -> None:
    with pytest.raises(DataError, match="takes 5 samples of data set 0, which has 4"):
        BlendedDataset([Numbers("a", 4), Numbers("b", 9)], blend_index([1, 1], 10))
    blend = BlendedDataset([Numbers("a", 5), Numbers("b", 5)], blend_index([1, 1], 10))
    assert blend[None] == ("a", None)
    for index in (10, -1):
        with pytest.raises(IndexError):
            blend[index]


def test_all_of_everything_with_an_empty_one() -> None:
    blend = BlendedDataset([Numbers("a", 2), Numbers("b", 0), Numbers("c", 1)])
    assert sorted(blend[k] for k in range(len(blend))) == [("a", 0), ("a", 1), ("c", 0)]


def test_order_tells_blends_apart() -> None:
    one, two = Numbers("a", 9), Numbers("b", 9)
    orders = {
        BlendedDataset(list(sets), blend_index(weights, 9)).order
        for sets in ((one, two), (two, one))
        for weights in ([1, 1], [2, 1])
    }
    assert len(orders) == 4


def test_a_longer_run_goes_on_in_the_same_order() -> None:
    sets = [Numbers("a", 9999), Numbers("b", 9999)]
    orders = {BlendedDataset(sets, blend_index([2, 1], size), [2, 1]).order for size in (9, 1000, 5000)}
    assert orders == {BlendedDataset(sets, blend_index([2, 1], 5000)).order}, "as checkpoints of long blends have it"
    assert BlendedDataset(sets, blend_index([3, 1], 9), [3, 1]).order not in orders


def test_cache(tmp_path: Path) -> None:
    first = cached_blend_index(tmp_path, "train", [2, 1], 1000)
    assert first.tolist() == blend_index([2, 1], 1000).tolist()
    assert cached_blend_index(tmp_path, "train", [2, 1], 1000).tolist() == first.tolist()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("weights", [[], [0, 1], [-1], [float("nan")], [float("inf")], [1] * 40_000])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"above 0|at most 32767"):
        whole_weights(weights)


def test_weights_are_the_decimals_written() -> None:
    assert whole_weights([0.1, 0.2]) == [1, 2]
    assert whole_weights([1e-3, 2.5]) == [1, 2500]
    assert whole_weights([2e9, 3e9]) == [2, 3]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.data.corpus import split_bounds
from megalight.errors import DataError


@pytest.mark.parametrize(
    ("split", "count", "sizes"),
    [
        ("969,30,1", 1000, (969, 30, 1)),
        ("969,30,1", 10, (10, 0, 0)),
        ("969,30,1", 100, (97, 3, 0)),
        ("90,5,5", 7, (6, 1, 0)),
        ("1", 3, (3, 0, 0)),
        ("0,1,0", 3, (0, 3, 0)),
        ("0.5, 0.5, 0", 5, (2, 3, 0)),  # round half to even, as Megatron does
    ],
)
def test_known(split: str, count: int, sizes: tuple[int, int, int]) -> None:
    assert tuple(map(len, split_bounds(split, count))) == sizes


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), st.integers(0, 10**9))
def test_splits_cover_everything_once(weights: list[int], count: int) -> None:
    bounds = split_bounds(",".join(map(str, weights)), count)
    assert bounds[0].start == 0
    assert bounds[2].stop == count
    assert bounds[0].stop == bounds[1].start
    assert bounds[1].stop == bounds[2].start
    total, edge = sum(weights), 0
    for weight, part in zip(weights, bounds, strict=True):
        edge += weight
        assert abs(part.stop - edge * count / total) <= 0.5 + 1e-6 * count / 10**6


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf", "90,10", "90/10"])
def test_bad(split: str) -> None:
    with pytest.raises(DataError, match="give three weights >= 0 for train, validation and test"):
        split_bounds(split, 10)

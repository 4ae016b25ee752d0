from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from megalight.errors import ConfigurationError
from megalight.rl.countdown import Countdown, CountdownPuzzles


def solvable(numbers: list[float], target: int) -> bool:
    """Try every equation."""
    if len(numbers) == 1:
        return abs(numbers[0] - target) < 1e-9
    for i, one in enumerate(numbers):
        for j, other in enumerate(numbers):
            if i == j:
                continue
            rest = [each for k, each in enumerate(numbers) if k not in (i, j)]
            made = [one + other, one - other, one * other, *([one / other] if other else [])]
            if any(solvable([*rest, each], target) for each in made):
                return True
    return False


def test_puzzles_have_a_solution_and_differ() -> None:
    rows = CountdownPuzzles(count=60, sizes=[2, 3], largest=12, largest_target=30).rows()
    assert len({(row["target"], *sorted(row["nums"])) for row in rows}) == 60
    for row in rows:
        assert solvable([float(number) for number in row["nums"]], row["target"])
        assert len(row["nums"]) in (2, 3)
        assert all(1 <= number <= 12 for number in row["nums"])
        assert 1 <= row["target"] <= 30
        assert ", ".join(map(str, row["nums"])) in row["prompt"]
        Countdown().check(row)


def test_equal_seeds_give_equal_puzzles() -> None:
    first = CountdownPuzzles(count=20).rows()
    assert first == CountdownPuzzles(count=20).rows()
    assert first[:10] == CountdownPuzzles(count=10).rows()
    assert not any(row in first for row in CountdownPuzzles(count=20, seed=1).rows())
    assert all(one != other for one, other in pairwise(first))


def test_the_prompt_is_ones_own() -> None:
    (row,) = CountdownPuzzles(count=1, text="{numbers} -> {target}: \\boxed{}").rows()
    assert row["prompt"] == f"{', '.join(map(str, row['nums']))} -> {row['target']}: \\boxed{{}}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"largest": 0}, "largest is 0"),
        ({"sizes": []}, "sizes is"),
        ({"sizes": [1]}, "sizes is"),
        ({"text": "{numbers}"}, "without {target}"),
        ({"count": 50, "sizes": [2], "largest": 2, "largest_target": 4}, "there are about [1-9] different puzzles"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CountdownPuzzles(**{"count": 5, **options}).rows()

from __future__ import annotations

import pytest

from megalight.errors import ConfigurationError
from megalight.rl.environment import Answer
from megalight.rl.rewards import SoftOverlong


@pytest.mark.parametrize(("length", "value"), [(0, 0), (8, 0), (9, -0.25), (10, -0.5), (12, -1), (99, -1)])
def test_the_penalty_grows_in_the_buffer(length: int, value: float) -> None:
    assert SoftOverlong(longest=12, buffer=4)(Answer("", [1] * length, "length"), {}) == value


@pytest.mark.parametrize("buffer", [0, -1, 13])
def test_a_buffer_is_within_the_longest(buffer: int) -> None:
    with pytest.raises(ConfigurationError, match="buffer is"):
        SoftOverlong(longest=12, buffer=buffer)

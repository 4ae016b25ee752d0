"""The kernels that raise flags and wait for them, on one device."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 15])
def test_raised_flags_are_seen_and_lowered(count: int) -> None:
    from megalight.parallel.peers import spin

    words = torch.zeros(2 * count, dtype=torch.int32, device="cuda")
    flags = tuple(words.data_ptr() + 8 * place for place in range(count))  # every second word
    spin.raise_flags(flags)
    assert words.tolist() == [1, 0] * count
    for first in range(0, count, 16):
        spin.wait(flags[first : first + 16])
    assert not words.any()


def test_flags_are_raised_in_a_graph() -> None:
    from megalight.parallel.peers import spin

    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    flags = tuple(words.data_ptr() + 4 * place for place in (0, 2, 3))
    spin.raise_flags(flags)  # compiled before the capture
    words.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spin.raise_flags(flags)
    assert not words.any()
    for _ in range(2):
        words.zero_()
        graph.replay()
        assert words.tolist() == [1, 0, 1, 1]

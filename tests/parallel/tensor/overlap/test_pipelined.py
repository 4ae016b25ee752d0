from __future__ import annotations

import pytest

from megalight.parallel.tensor.overlap.pipelined import COLLECTIVE_SECONDS, best_pieces

LLAMA = {"qkv": (4096, 6144), "gate_up": (4096, 28672)}
"""Features in and out of column layers of an 8-billion-parameter model."""


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layer", LLAMA)
def test_large_products_are_cut(tp: int, layer: str) -> None:
    """And the cut never takes longer than the whole, by the model that chooses it."""
    inner, width = LLAMA[layer]
    shape = (tp, 8192 // tp, inner, width // tp, 2)
    pieces = best_pieces("gather", *shape)
    assert pieces > 1
    assert COLLECTIVE_SECONDS["gather"](pieces, *shape) < COLLECTIVE_SECONDS["gather"](1, *shape)


@pytest.mark.parametrize("way", COLLECTIVE_SECONDS)
def test_small_products_are_not(way: str) -> None:
    assert best_pieces(way, 4, 64, 512, 512, 2) == 1


def test_pieces_divide_the_ranks() -> None:
    assert best_pieces("scatter", 6, 4096, 4096, 4096, 2) in (1, 2, 3, 6)


def test_one_piece_costs_the_product_and_its_messages() -> None:
    """The formulas agree where nothing overlaps."""
    from_gather = COLLECTIVE_SECONDS["gather"](1, 4, 2048, 4096, 4096, 2)
    from_scatter = COLLECTIVE_SECONDS["scatter"](1, 4, 2048, 4096, 4096, 2)
    assert from_gather == pytest.approx(from_scatter)

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.parallel.shard import Piece, ShardSpec, boxes

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200)
@given(shapes, st.data())
def test_boxes_tile_the_interval_in_order_and_are_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    flat = torch.arange(total)
    whole = flat.view(shape)
    position, count = start, 0
    for offset, extent, first in boxes(shape, start, stop):
        assert len(offset) == len(extent) == len(shape)
        assert first == position
        box = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
        assert torch.equal(flat[first : first + prod(extent)].view(extent), box)
        position += prod(extent)
        count += 1
    assert position == stop
    assert count <= max(1, 2 * len(shape) - 1)


def test_boxes_of_empty_tensors() -> None:
    assert list(boxes((0, 3), 0, 0)) == []
    assert list(boxes((), 0, 0)) == []
    assert list(boxes((), 0, 1)) == [((), (), 0)]


def test_a_piece_is_a_view_of_its_parameter() -> None:
    parameter = torch.arange(20.0).view(5, 4)
    piece = Piece("k.weight", (6, 4), (3, 0), (2, 4), start=8)
    assert (piece.numel, piece.stop) == (8, 16)
    assert torch.equal(piece.view(parameter), parameter[2:4])
    assert piece.view(parameter).data_ptr() == parameter[2:].data_ptr()
    assert torch.zeros(6, 4)[piece.box].shape == (2, 4)


def test_cut_leaves_padding_out() -> None:
    first = Piece("a", (3, 2), (0, 0), (2, 2), start=0)
    second = Piece("b", (2, 2), (1, 0), (1, 2), start=4)
    spec = ShardSpec((first, second), (4, 2))
    assert spec.numel == 8
    assert list(spec.cut(0, 8)) == [(first, 0, 4), (second, 0, 2)]
    assert list(spec.cut(3, 5)) == [(first, 3, 4), (second, 0, 1)]
    assert list(spec.cut(6, 8)) == []
    whole = ShardSpec.replicated("c", (2, 3), partial=("tp",), owner=False)
    (piece,) = whole.pieces
    assert (piece.partial, piece.owner, piece.size) == (("tp",), False, (2, 3))

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.errors import LayoutError
from megalight.nn.canonical import CanonicalPart
from megalight.parallel import shard
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec, boxes, check_cover

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
    piece = ShardPiece("k.weight", (6, 4), (3, 0), (2, 4), start=8)
    assert (piece.numel, piece.stop) == (8, 16)
    assert torch.equal(piece.view(parameter), parameter[2:4])
    assert piece.view(parameter).data_ptr() == parameter[2:].data_ptr()
    assert torch.zeros(6, 4)[piece.box].shape == (2, 4)


def test_cut_leaves_padding_out() -> None:
    first = ShardPiece("a", (3, 2), (0, 0), (2, 2), start=0)
    second = ShardPiece("b", (2, 2), (1, 0), (1, 2), start=4)
    spec = ShardSpec((first, second), (4, 2))
    assert spec.numel == 8
    assert list(spec.cut(0, 8)) == [(first, 0, 4), (second, 0, 2)]
    assert list(spec.cut(3, 5)) == [(first, 3, 4), (second, 0, 1)]
    assert list(spec.cut(6, 8)) == []
    whole = ShardSpec.replicated("c", (2, 3), partial=("tp",), owner=False)
    (piece,) = whole.pieces
    assert (piece.partial, piece.owner, piece.size) == (("tp",), False, (2, 3))


def grids(world: int, **degrees: int) -> list[ParallelMesh]:
    return [ParallelMesh(world, rank, **degrees) for rank in range(world)]


def specs(mesh: ParallelMesh, units: int, *, partial: bool) -> dict[str, ShardSpec]:
    """Every way to split: columns in units that several ranks may share, rows, a vocabulary, replicas."""
    q, kv = CanonicalPart("qkv", "q", (units * 8, 3), 0), CanonicalPart("qkv", "k", (units, 3), units * 24)
    return {
        "qkv": shard.output_features([q, kv], (), mesh, units=[units * 8, units]),
        "proj": shard.along([CanonicalPart("proj", "proj", (3, 16), 0)], (3, 16), mesh, dim=1),
        "conv": shard.along([CanonicalPart("conv", "conv", (3, 2, 8, 5), 0)], (3, 2, 8, 5), mesh, dim=2),
        "embed": shard.vocabulary([CanonicalPart("embed", "embed", (29, 3), 0)], (29, 3), mesh),
        "norm": shard.replicated([CanonicalPart("norm", "norm", (5,), 0)], (5,), mesh, partial=partial),
    }


@settings(deadline=None, max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 3),
    units=st.sampled_from([1, 2, 4, 16]),
    partial=st.booleans(),
)
def test_axes_cover_the_mesh_exactly_once(tp: int, cp: int, dp: int, units: int, partial: bool) -> None:
    meshes = grids(tp * cp * dp, tp=tp, cp=cp)
    check_cover(meshes[0], [specs(mesh, units, partial=partial) for mesh in meshes])


@pytest.mark.parametrize(
    ("piece", "data", "message"),
    [
        ({"owner": True}, ("dp", "cp"), r"ranks \[0, 1, 2, 3\] own it"),
        ({"owner": False}, ("dp", "cp"), "no rank owns it"),
        ({"partial": ("tp",)}, ("tp",), "among both its data"),
        ({}, ("cp",), "see different tokens, but its data axes"),
        ({"offset": (1,), "size": (4,)}, ("dp", "cp"), "hold 4 of its 5 elements"),
        ({"partial": ("ep",)}, ("dp", "cp"), "mix the dense and the expert view"),
    ],
)
def test_specs_that_do_not_cover_the_mesh(piece: dict[str, object], data: tuple[str, ...], message: str) -> None:
    meshes = grids(4, tp=2)
    whole = ShardPiece("a", (5,), (0,), (5,))
    held = [
        {"a": ShardSpec((replace(whole, **({"owner": mesh.rank("tp") == 0} | piece)),), (5,), data)} for mesh in meshes
    ]
    with pytest.raises(LayoutError, match=message):
        check_cover(meshes[0], held)


def test_boxes_that_overlap_are_refused() -> None:
    pieces = [ShardPiece("a", (5,), (first,), (3,)) for first in (0, 2)]
    held = [{"a": ShardSpec((piece,), (3,))} for piece in pieces]
    with pytest.raises(LayoutError, match="of a overlap"):
        check_cover(ParallelMesh(2, tp=2), held)
    differing = [ShardPiece("a", (3,), (0,), (3,), partial=partial) for partial in ((), ("tp",))]
    with pytest.raises(LayoutError, match=r"ranks \[0, 1\] are summed, but not all hold it alike"):
        check_cover(ParallelMesh(2), [{"a": ShardSpec((piece,), (3,))} for piece in differing])
